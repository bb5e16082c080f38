-- Slurm, JobSubmitPlugins=lua: sets gres/shard for jobs that state their network and request no GPU.
-- Install next to slurm.conf, with vramcast.lua. Fails open: after any error the job is submitted unchanged.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/"
local loaded, vramcast = pcall(dofile, here .. "vramcast.lua")

local function sized(job_desc)
    local answer = vramcast.answer(job_desc.script, job_desc.comment)
    if not answer then
        return
    end
    slurm.log_user(string.format("vramcast: this job will take about %d MiB of GPU memory (%s)", answer.need_mib, answer.verdict))
    if vramcast.asks_for_gpus(job_desc.tres_per_job, job_desc.tres_per_node, job_desc.tres_per_socket, job_desc.tres_per_task) then
        return -- a GPU is gres/gpu or gres/shard, never both: the user's request has priority
    end
    -- 'gres/shard:N' since Slurm 21.08, 'gres:shard:N' before
    local wanted = (vramcast.older_syntax and "gres:shard:" or "gres/shard:") .. answer.shards
    local there = job_desc.tres_per_node
    job_desc.tres_per_node = (type(there) == "string" and there ~= "") and (there .. "," .. wanted) or wanted
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    if loaded then
        local fine, problem = pcall(sized, job_desc)
        if not fine then
            slurm.log_error("vramcast: %s", tostring(problem))
        end
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end

return slurm.SUCCESS
