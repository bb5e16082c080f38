-- Slurm, CliFilterPlugins=lua: the same as job_submit.lua in sbatch, salloc and srun, where a delay affects one user only.
-- The service needs a second or two for a new network; after this request, job_submit.lua gets a cached answer.
-- Install next to slurm.conf, with vramcast.lua. Fails open.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/"
local loaded, vramcast = pcall(dofile, here .. "vramcast.lua")
if loaded then
    vramcast.seconds = 5
end

-- The path of the script is the first argument of sbatch after its options; a wrapped command has none.
local function script_of(options)
    local words = options["argv"]
    local path = type(words) == "table" and words[1] or nil
    if type(path) ~= "string" then
        return nil
    end
    local file = io.open(path, "r")
    if not file then
        return nil
    end
    local text = file:read(65536)
    file:close()
    return text
end

-- '--gpus=1' names no resource in its value, '--gres=gpu:1' does.
local function asks_for_gpus(options)
    for _, name in ipairs({ "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task" }) do
        if type(options[name]) == "string" and options[name] ~= "" then
            return true
        end
    end
    return vramcast.asks_for_gpus(options["gres"], options["tres-per-task"])
end

local function sized(options)
    local answer = vramcast.answer(script_of(options), options["comment"])
    if not answer then
        return
    end
    slurm.log_info("vramcast: this job will take about %d MiB of GPU memory (%s)", answer.need_mib, answer.verdict)
    if asks_for_gpus(options) then
        return
    end
    local there = options["gres"]
    local wanted = "shard:" .. answer.shards
    options["gres"] = (type(there) == "string" and there ~= "" and there ~= "none") and (there .. "," .. wanted) or wanted
end

function slurm_cli_setup_defaults(options, early_pass)
    return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, pack_offset)
    if loaded then
        local fine, problem = pcall(sized, options)
        if not fine then
            slurm.log_error("vramcast: %s", tostring(problem))
        end
    end
    return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job_id, step_id)
    return slurm.SUCCESS
end
