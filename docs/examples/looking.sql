-- [start progress]
SELECT job_execution_id, job_name, status, partitions, pending, claimed, completed, failed, per_cent, oldest_claim_s
FROM batch_job_progress
WHERE status IN ('STARTING', 'STARTED', 'STOPPING')
ORDER BY job_execution_id;
-- [end progress]

-- [start cluster]
SELECT node_id, node_group, status, heartbeat_age_s, running, capacity, running_partitions
FROM batch_cluster
ORDER BY node_id;
-- [end cluster]

-- [start coordination]
SELECT job_execution_id, manager, manager_step, status, created_time, start_time, end_time
FROM batch_job_coordination
ORDER BY job_execution_id DESC;
-- [end coordination]

-- [start failed]
SELECT partition_key, assigned_node, attempt, node_losses, exit_message
FROM batch_partitions
WHERE job_execution_id = 1 AND status = 'FAILED';
-- [end failed]

-- [start events]
SELECT event_time, event, node_id, version, message
FROM batch_partition_events
WHERE job_execution_id = 1
ORDER BY event_id;
-- [end events]

-- [start silent]
SELECT COUNT(*)
FROM batch_cluster
WHERE status IN ('ACTIVE', 'UNREACHABLE') AND heartbeat_age_s > 10;
-- [end silent]
