-- Slurm's plugin for vramcast: gives shards (gres/shard) to jobs that state their network and request no GPU.
--
-- Install this one file next to slurm.conf under two names: job_submit.lua (JobSubmitPlugins=lua) for slurmctld, and
-- cli_filter.lua (CliFilterPlugins=lua) for sbatch, salloc and srun. Either is enough, both together ask only once. It loads
-- no other file, because a configless Slurm sends cli_filter.lua to its nodes and nothing beside it.
-- Fails open: after any error the job is submitted unchanged.
--
-- Lua has no HTTP. This uses curl through io.popen, and not LuaSocket, because
--   * its max-time bounds a whole transfer (connecting, sending, waiting, reading); LuaSocket's timeout is for each step;
--   * slurmctld's Lua seldom has LuaSocket, while curl is on nearly every host;
--   * a failure affects only its own process.
-- Text of a user is passed in files, never on a command line.

local settings = {
    service = "http://127.0.0.1:8080", -- as cli_filter.lua this runs on login nodes: name a host that they reach
    token_file = "/etc/slurm/vramcast.token", -- mode 600, of SlurmUser; in a user's environment VRAMCAST_TOKEN replaces it
    gpu_shards = nil, -- shards of the largest GPU of the cluster; nil: of the GPU that the answer is for
    refuse_too_large = false, -- true: refuse a job that fits on no GPU; false: say so, and submit it
    slurmctld_seconds = 0.2, -- slurmctld holds locks while a plugin runs
    probe_seconds = 0.2, -- for the service to show that it is alive, before sbatch waits for an answer
    user_seconds = 5, -- for the answer: a new network is simulated
    pause_seconds = 10, -- after a timeout, nothing is asked for so long
    longest = 20000, -- characters of a description
    longest_file = 200000, -- of an exported job
    mark = "#VRAMCAST", -- in a script: '#VRAMCAST {"family": ...}', '#VRAMCAST name', or '#VRAMCAST job.json', an exported job
    prefix = "vramcast:", -- in a comment: 'vramcast:name'
}

local TIMED_OUT, REFUSED = 28, 7 -- exit codes of curl
local paused_until = 0 -- circuit breaker; slurmctld keeps this file loaded

local function filled(text)
    return type(text) == "string" and text ~= ""
end

local function trimmed(text)
    local inner = text:match("^%s*(.-)%s*$")
    if inner == "" or #inner > settings.longest then
        return nil
    end
    return inner
end

-- Return the job in a line of the script, or in the comment; nil if there is none.
local function description_of(script, comment)
    if type(script) == "string" then
        for line in script:gmatch("[^\r\n]+") do
            if line:sub(1, #settings.mark) == settings.mark and line:sub(#settings.mark + 1):match("^%s") then
                return trimmed(line:sub(#settings.mark + 1))
            end
        end
    end
    if type(comment) == "string" and comment:sub(1, #settings.prefix) == settings.prefix then
        return trimmed(comment:sub(#settings.prefix + 1))
    end
    return nil
end

-- Return the first file of an exported job's code that is not as it was; names that a shell would interpret are left out.
local function changed_file(export)
    for path, hash in export:gmatch('"([%w%._/-]+)":"(%x+)"') do
        local file = #hash == 64 and path:sub(1, 1) ~= "-" and io.open(path, "r")
        local pipe = file and io.popen("sha256sum " .. path .. " 2>/dev/null", "r")
        local sum = pipe and (pipe:read("*a") or ""):match("^%x+")
        if file then
            file:close()
        end
        if pipe then
            pipe:close()
        end
        if sum and sum ~= hash then
            return path
        end
    end
    return nil
end

-- Return the contents of an exported job in place of the name of its file. Only a command of the user reads files.
local function with_export(description)
    if not description or not description:match("^[^{%s]+%.json$") then
        return description
    end
    local file = io.open(description, "r")
    local text = file and file:read(settings.longest_file + 1)
    if file then
        file:close()
    end
    if not text or #text > settings.longest_file then
        slurm.log_info("vramcast: no exported job of at most %d characters in %s", settings.longest_file, description)
        return nil
    end
    local changed = changed_file(text)
    if changed then
        slurm.log_info("vramcast: %s changed since %s was exported: export it again", changed, description)
    end
    return text
end

-- A value in curl's configuration file (man curl, --config).
local function quoted(text)
    return '"' .. text:gsub("\\", "\\\\"):gsub('"', '\\"') .. '"'
end

-- Write a file that only this user can read (Lua makes it with mkstemp); its name is plain enough for any shell.
local function temporary(text)
    local path = os.tmpname()
    local file = io.open(path, "wb")
    if not file or not path:match("^[%w/._-]+$") then
        return nil
    end
    file:write(text)
    file:close()
    return path
end

-- Return the token of the environment, or of the file if this user can read it.
local function token_of()
    local text = os.getenv("VRAMCAST_TOKEN")
    local file = not filled(text) and io.open(settings.token_file, "r")
    if file then
        text = file:read(4096)
        file:close()
    end
    return text and text:match("[^\r\n]+")
end

-- Return curl's configuration: the question, and before it a probe if sbatch may wait long for the answer.
local function curl_lines(body, seconds)
    local lines = { "silent", "fail-early", 'noproxy = "*"' }
    local function add(format, ...)
        lines[#lines + 1] = string.format(format, ...)
    end
    if seconds > settings.probe_seconds then
        add("url = %s", quoted(settings.service .. "/healthz"))
        add('output = "/dev/null"\nmax-time = %.3f\nnext\nsilent\nnoproxy = "*"', settings.probe_seconds)
    end
    add("url = %s", quoted(settings.service .. "/v1/slurm"))
    add("max-time = %.3f", seconds)
    add('header = "Content-Type: text/plain"')
    add("data-binary = %s", quoted("@" .. body))
    local token = token_of()
    if token then -- in the file, since everyone can read a command line
        add("header = %s", quoted("Authorization: Bearer " .. token))
    end
    return table.concat(lines, "\n") .. "\n"
end

-- Parse lines of key=value; anything else is not an answer.
local function parsed(text)
    local values = {}
    for key, value in text:gmatch("([%w_]+)=([^\r\n]*)") do
        values[key] = value
    end
    local shards, need = tonumber(values.shards), tonumber(values.need_mib)
    local exit = tonumber(values.curl_exit)
    if exit == TIMED_OUT then
        paused_until = os.time() + settings.pause_seconds
        return nil, "no answer in time from " .. settings.service
    elseif exit == REFUSED then
        return nil, "no service at " .. settings.service
    elseif not shards or not need or shards < 1 or shards ~= math.floor(shards) then
        return nil, text:match('"error":"([^"]*)"') or "no answer from " .. settings.service
    end
    -- an observation is more informative than the verdict of a forecast
    local verdict = values.basis == "observed" and "observed before" or (values.verdict or ""):gsub("_", " ")
    return {
        shards = math.floor(shards),
        need_mib = need,
        verdict = verdict,
        device = values.device or "",
        gpu_shards = settings.gpu_shards or tonumber(values.gpu_shards) or math.huge,
    }
end

-- Return the answer of the service as a table, or nil and a reason.
local function ask(description, seconds)
    local body = temporary(description)
    local config = body and temporary(curl_lines(body, seconds))
    local pipe = config and io.popen("curl --config " .. config .. " 2>/dev/null; printf '\\ncurl_exit=%d\\n' $?", "r")
    local text = pipe and pipe:read("*a") or ""
    if pipe then
        pipe:close()
    end
    for _, path in ipairs({ body or false, config or false }) do
        if path then
            os.remove(path)
        end
    end
    return parsed(text)
end

-- Return the answer for a described job; nil if there is no job, or no answer, which is logged.
local function answer_for(description, seconds)
    if not description then
        return nil
    elseif os.time() < paused_until then
        slurm.log_debug("vramcast: the service did not answer in time a moment ago; the job is submitted unchanged")
        return nil
    end
    local answer, reason = ask(description, seconds)
    if not answer then
        slurm.log_info("vramcast: no estimate (%s); the job is submitted unchanged", reason)
    end
    return answer
end

-- Return true if the user decided about GPUs: a GPU is gres/gpu or gres/shard, never both, and 'none' is a decision, too.
local function decided(...)
    for index = 1, select("#", ...) do
        local text = select(index, ...)
        if filled(text) then
            local all = "," .. text:lower() .. ","
            if all:find("gpu", 1, true) or all:find("shard", 1, true) or all:find("mps", 1, true) or all:find("[:/,]none,") then
                return true
            end
        end
    end
    return false
end

-- Return the number of processes on each node, which share one request for shards; nil if only their total is known.
local function processes_on_a_node(per_node, total, nodes)
    if per_node and per_node > 0 then
        return per_node
    elseif not total or total <= 1 then
        return 1
    end
    return nodes == 1 and total or nil
end

-- Return the shards to request, the sentences for the user, and true if no GPU has room for them.
local function request_for(answer, processes, requests)
    local shards = answer.shards * (processes or 1)
    local sentences = {
        string.format(
            "vramcast: %s will take about %d MiB of GPU memory (%s)",
            processes == 1 and "this job" or "each process of this job", answer.need_mib, answer.verdict
        ),
    }
    if not requests then
        return shards, sentences, false
    end
    if not processes then
        sentences[2] = string.format(
            "vramcast: shard:%d is for one process on each node: state --ntasks-per-node, and it is multiplied", shards
        )
    end
    local too_large = shards > answer.gpu_shards
    if too_large then
        sentences[#sentences + 1] = string.format(
            "vramcast: the job needs shard:%d of one GPU, and the largest request that fits is shard:%d (%s): %s",
            shards, answer.gpu_shards, settings.gpu_shards and "the largest GPU" or answer.device,
            settings.refuse_too_large and "it is refused; make it smaller" or "without a larger GPU it waits forever"
        )
    end
    return shards, sentences, too_large and settings.refuse_too_large
end

-- Return a field of a job as a number; nil if it is unset (Slurm's NO_VAL and NO_VAL16, a bitwise -2).
local function number(value)
    local amount = tonumber(value)
    if not amount or amount < 0 or amount >= 4294967294 or amount == 65534 or amount == 65535 then
        return nil
    end
    return amount
end

local function joined(there, wanted)
    return filled(there) and (there .. "," .. wanted) or wanted
end

-- Return true if the script wants no resources: sbatch does not send '--gres=none' to slurmctld.
local function wants_none(script)
    for line in (type(script) == "string" and script or ""):gmatch("[^\r\n]+") do
        if line:match("^#SBATCH%s+%-%-gres[=%s]%s*[Nn][Oo][Nn][Ee]%s*$") then
            return true
        end
    end
    return false
end

-- Size a job in slurmctld. Return true if it is refused.
local function size_in_slurmctld(job)
    if decided(job.tres_per_job, job.tres_per_node, job.tres_per_socket, job.tres_per_task) or wants_none(job.script) then
        return false -- also after cli_filter, which has told the user
    end
    local description = description_of(job.script, job.comment)
    if description and description:match("^[^{%s]+%.json$") then
        slurm.log_info("vramcast: slurmctld reads no files of users: %s is for cli_filter.lua", description)
        return false
    end
    local answer = answer_for(description, settings.slurmctld_seconds)
    if not answer then
        return false
    end
    local nodes = number(job.min_nodes) == number(job.max_nodes) and number(job.max_nodes)
    local processes = processes_on_a_node(number(job.ntasks_per_node), number(job.num_tasks), nodes)
    local shards, sentences, refused = request_for(answer, processes, true)
    for _, sentence in ipairs(sentences) do
        slurm.log_user("%s", sentence)
    end
    if not refused then
        -- 'gres/shard:N' since Slurm 23.11, which has this constant; 'gres:shard:N' before. Each refuses the other's form.
        local form = slurm.GRES_ONE_TASK_PER_SHARING ~= nil and "gres/shard:" or "gres:shard:"
        job.tres_per_node = joined(job.tres_per_node, form .. shards)
    end
    return refused
end

-- The path of the script is the first argument of sbatch after its options; a wrapped command has none.
local function script_of(options)
    local words = options["argv"]
    local path = type(words) == "table" and words[1] or nil
    local file = type(path) == "string" and io.open(path, "r")
    if not file then
        return nil
    end
    local text = file:read(65536)
    file:close()
    return text
end

-- '--gpus=1' names no resource in its value, '--gres=gpu:1' does.
local function decided_by_options(options)
    for _, name in ipairs({ "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task" }) do
        if filled(options[name]) then
            return true
        end
    end
    return decided(options["gres"], options["tres-per-task"])
end

-- Size a job in sbatch, salloc or srun. Return true if it is refused.
local function size_in_command(options)
    if os.getenv("SLURM_JOB_ID") and options["type"] ~= "sbatch" then
        return false -- a step of a job, whose shards are allocated
    end
    local answer = answer_for(with_export(description_of(script_of(options), options["comment"])), settings.user_seconds)
    if not answer then
        return false
    end
    local requests = not decided_by_options(options)
    local processes = processes_on_a_node(
        number(options["ntasks-per-node"]), number(options["ntasks"]), number(options["nodes"])
    )
    local shards, sentences, refused = request_for(answer, processes, requests)
    for _, sentence in ipairs(sentences) do
        slurm.log_info("%s", sentence)
    end
    if requests and not refused then
        options["gres"] = joined(options["gres"], "shard:" .. shards)
    elseif type(options["gres"]) == "string" and options["gres"]:lower() == "none" then
        options["gres"] = "shard:0" -- the same, but it reaches slurmctld, whose plugin then leaves the job alone
    end
    return refused
end

-- Return a result for Slurm; an error of the plugin itself lets the job pass.
local function result_of(size, job)
    local fine, refused = pcall(size, job)
    if not fine then
        slurm.log_error("vramcast: %s", tostring(refused))
    end
    return fine and refused and slurm.ERROR or slurm.SUCCESS
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    return result_of(size_in_slurmctld, job_desc)
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end

function slurm_cli_setup_defaults(options, early_pass)
    return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, pack_offset)
    return result_of(size_in_command, options)
end

function slurm_cli_post_submit(offset, job_id, step_id)
    return slurm.SUCCESS
end

return slurm.SUCCESS
