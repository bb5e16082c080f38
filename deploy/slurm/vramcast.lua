-- Shared by job_submit.lua and cli_filter.lua: finds the job in a script, sends it to the service, and reads the answer.
--
-- Lua has no HTTP. This uses curl through io.popen, and not LuaSocket, because
--   * its --max-time bounds all of a request (connecting, sending, waiting, reading); LuaSocket's timeout is for each step;
--   * slurmctld's Lua seldom has LuaSocket, while curl is on nearly every host;
--   * a failure affects only its own process.
-- Text of a user is passed in files, never on a command line.

local vramcast = {
    url = "http://127.0.0.1:8080/v1/slurm",
    seconds = 0.1, -- slurmctld holds locks while a plugin runs
    token = nil,
    longest = 20000, -- characters of a description
    mark = "#VRAMCAST", -- in a script: '#VRAMCAST {"family": ...}' or '#VRAMCAST name'
    prefix = "vramcast:", -- in a comment: 'vramcast:name'
}

-- Return the job in a line of the script, or in the comment; nil if there is none.
function vramcast.description(script, comment)
    if type(script) == "string" then
        for line in script:gmatch("[^\r\n]+") do
            if line:sub(1, #vramcast.mark) == vramcast.mark and line:sub(#vramcast.mark + 1):match("^%s") then
                return vramcast.trimmed(line:sub(#vramcast.mark + 1))
            end
        end
    end
    if type(comment) == "string" and comment:sub(1, #vramcast.prefix) == vramcast.prefix then
        return vramcast.trimmed(comment:sub(#vramcast.prefix + 1))
    end
    return nil
end

function vramcast.trimmed(text)
    local trimmed = text:match("^%s*(.-)%s*$")
    if trimmed == "" or #trimmed > vramcast.longest then
        return nil
    end
    return trimmed
end

-- A value in curl's configuration file (man curl, --config).
function vramcast.quoted(text)
    return '"' .. text:gsub("\\", "\\\\"):gsub('"', '\\"') .. '"'
end

-- A file that only this user can read (Lua makes it with mkstemp); its name is plain enough for any shell.
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

-- Return the answer as a table {need_mib, shards, verdict, device}, or nil and a reason.
function vramcast.ask(description)
    local body = temporary(description)
    if not body then
        return nil, "no temporary file"
    end
    local lines = {
        "silent",
        'noproxy = "*"',
        "max-time = " .. string.format("%.3f", vramcast.seconds),
        'header = "Content-Type: text/plain"',
        "data-binary = " .. vramcast.quoted("@" .. body),
        "url = " .. vramcast.quoted(vramcast.url),
    }
    if vramcast.token then -- in the file, since everyone can read a command line
        lines[#lines + 1] = "header = " .. vramcast.quoted("Authorization: Bearer " .. vramcast.token)
    end
    local settings = temporary(table.concat(lines, "\n") .. "\n")
    local pipe = settings and io.popen("curl --config " .. settings .. " 2>/dev/null", "r")
    local text = pipe and pipe:read("*a") or ""
    if pipe then
        pipe:close()
    end
    os.remove(body)
    if settings then
        os.remove(settings)
    end
    return vramcast.parsed(text)
end

-- Parse lines of key=value; anything else is not an answer.
function vramcast.parsed(text)
    local values = {}
    for key, value in text:gmatch("([%w_]+)=([^\r\n]*)") do
        values[key] = value
    end
    local shards, need = tonumber(values.shards), tonumber(values.need_mib)
    if not shards or not need or shards < 1 or shards ~= math.floor(shards) then
        return nil, text:match('"error":"([^"]*)"') or "no answer in time"
    end
    -- an observation is more informative than the verdict of a forecast
    local verdict = values.basis == "observed" and "observed before" or values.verdict or ""
    return { shards = math.floor(shards), need_mib = need, verdict = verdict, device = values.device or "" }
end

-- Return the answer for the job in a script or comment; nil if there is no job, or no answer, which is logged.
function vramcast.answer(script, comment)
    local description = vramcast.description(script, comment)
    if not description then
        return nil
    end
    local answer, reason = vramcast.ask(description)
    if not answer then
        slurm.log_info("vramcast: no estimate (%s); the job is submitted unchanged", reason)
    end
    return answer
end

-- Return true if a request for resources contains GPUs or shards: the user's request has priority.
function vramcast.asks_for_gpus(...)
    for index = 1, select("#", ...) do
        local text = select(index, ...)
        if type(text) == "string" and (text:find("gpu", 1, true) or text:find("shard", 1, true) or text:find("mps", 1, true)) then
            return true
        end
    end
    return false
end

return vramcast
