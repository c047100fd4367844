-- mysql: printed by `dbpartition db sql --dialect mysql`; do not edit.
CREATE TABLE batch_nodes (
    node_id VARCHAR(200) NOT NULL,
    node_group VARCHAR(100) NOT NULL,
    host VARCHAR(255) NOT NULL,
    pid INTEGER NOT NULL,
    version VARCHAR(50) NOT NULL,
    status VARCHAR(20) NOT NULL,
    capacity INTEGER NOT NULL,
    current_load INTEGER NOT NULL,
    steps JSON NOT NULL,
    created_time DATETIME(6) NOT NULL,
    last_heartbeat DATETIME(6) NOT NULL,
    CONSTRAINT pk_batch_nodes PRIMARY KEY (node_id),
    CONSTRAINT ck_batch_nodes_status CHECK (status IN ('ACTIVE', 'DRAINING', 'UNREACHABLE', 'REMOVED'))
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;
CREATE INDEX ix_batch_nodes_status ON batch_nodes (status, node_group);
CREATE TABLE batch_job_instances (
    job_instance_id BIGINT NOT NULL AUTO_INCREMENT,
    job_name VARCHAR(250) NOT NULL,
    job_key VARCHAR(64) NOT NULL,
    generation INTEGER NOT NULL,
    parameters JSON NOT NULL,
    created_time DATETIME(6) NOT NULL,
    CONSTRAINT pk_batch_job_instances PRIMARY KEY (job_instance_id),
    CONSTRAINT uq_batch_job_instances_identity UNIQUE (job_name, job_key, generation)
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;
CREATE TABLE batch_partition_events (
    event_id BIGINT NOT NULL AUTO_INCREMENT,
    step_execution_id BIGINT NOT NULL,
    job_execution_id BIGINT NOT NULL,
    event VARCHAR(20) NOT NULL,
    node_id VARCHAR(200),
    version INTEGER NOT NULL,
    event_time DATETIME(6) NOT NULL,
    message MEDIUMTEXT,
    CONSTRAINT pk_batch_partition_events PRIMARY KEY (event_id)
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;
CREATE INDEX ix_batch_partition_events_job_execution_id ON batch_partition_events (job_execution_id);
CREATE INDEX ix_batch_partition_events_step_execution_id ON batch_partition_events (step_execution_id);
CREATE TABLE batch_job_executions (
    job_execution_id BIGINT NOT NULL AUTO_INCREMENT,
    job_instance_id BIGINT NOT NULL,
    active_instance_id BIGINT,
    step_name VARCHAR(200) NOT NULL,
    node_group VARCHAR(100) NOT NULL,
    status VARCHAR(20) NOT NULL,
    manager JSON NOT NULL,
    settings JSON NOT NULL,
    stealing SMALLINT NOT NULL,
    partition_count INTEGER NOT NULL,
    owner_token VARCHAR(64),
    deadline DATETIME(6),
    run_partition_key VARCHAR(250),
    create_time DATETIME(6) NOT NULL,
    start_time DATETIME(6),
    end_time DATETIME(6),
    last_updated DATETIME(6) NOT NULL,
    stop_requested SMALLINT NOT NULL,
    exit_message MEDIUMTEXT,
    CONSTRAINT pk_batch_job_executions PRIMARY KEY (job_execution_id),
    CONSTRAINT uq_batch_job_executions_active_instance_id UNIQUE (active_instance_id),
    CONSTRAINT ck_batch_job_executions_status CHECK (status IN ('STARTING', 'STARTED', 'STOPPING', 'COMPLETED', 'FAILED', 'STOPPED', 'ABANDONED')),
    CONSTRAINT ck_batch_job_executions_stop_requested CHECK (stop_requested IN (0, 1)),
    CONSTRAINT ck_batch_job_executions_active CHECK ((active_instance_id IS NOT NULL) = (status IN ('STARTING', 'STARTED', 'STOPPING'))),
    CONSTRAINT fk_batch_job_executions_job_instance_id FOREIGN KEY(job_instance_id) REFERENCES batch_job_instances (job_instance_id)
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;
CREATE INDEX ix_batch_job_executions_job_instance_id ON batch_job_executions (job_instance_id);
CREATE TABLE batch_partitions (
    step_execution_id BIGINT NOT NULL AUTO_INCREMENT,
    job_execution_id BIGINT NOT NULL,
    job_instance_id BIGINT NOT NULL,
    partition_key VARCHAR(200) NOT NULL,
    step_name VARCHAR(200) NOT NULL,
    node_group VARCHAR(100) NOT NULL,
    assigned_node VARCHAR(200),
    status VARCHAR(20) NOT NULL,
    is_transferable SMALLINT NOT NULL,
    transfer_policy VARCHAR(20) NOT NULL,
    version INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    weight DOUBLE NOT NULL,
    attempt INTEGER NOT NULL,
    node_losses INTEGER NOT NULL,
    available_at DATETIME(6) NOT NULL,
    execution_context JSON NOT NULL,
    checkpoint JSON,
    result JSON,
    read_count BIGINT NOT NULL DEFAULT '0',
    write_count BIGINT NOT NULL DEFAULT '0',
    filter_count BIGINT NOT NULL DEFAULT '0',
    skip_count BIGINT NOT NULL DEFAULT '0',
    commit_count BIGINT NOT NULL DEFAULT '0',
    rollback_count BIGINT NOT NULL DEFAULT '0',
    create_time DATETIME(6) NOT NULL,
    claim_time DATETIME(6),
    end_time DATETIME(6),
    last_updated DATETIME(6) NOT NULL,
    exit_message MEDIUMTEXT,
    CONSTRAINT pk_batch_partitions PRIMARY KEY (step_execution_id),
    CONSTRAINT uq_batch_partitions_key UNIQUE (job_execution_id, partition_key),
    CONSTRAINT ck_batch_partitions_status CHECK (status IN ('PENDING', 'CLAIMED', 'COMPLETED', 'FAILED', 'STOPPED')),
    CONSTRAINT ck_batch_partitions_is_transferable CHECK (is_transferable IN (0, 1)),
    CONSTRAINT ck_batch_partitions_transfer_policy CHECK (transfer_policy IN ('always', 'until_started', 'never')),
    CONSTRAINT ck_batch_partitions_claimed_has_owner CHECK (status <> 'CLAIMED' OR assigned_node IS NOT NULL),
    CONSTRAINT fk_batch_partitions_job_execution_id FOREIGN KEY(job_execution_id) REFERENCES batch_job_executions (job_execution_id)
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;
CREATE INDEX ix_batch_partitions_execution_status ON batch_partitions (job_execution_id, status);
CREATE INDEX ix_batch_partitions_free_all ON batch_partitions (status, node_group, priority DESC, step_execution_id);
CREATE INDEX ix_batch_partitions_own_all ON batch_partitions (status, assigned_node, priority DESC, step_execution_id);
CREATE INDEX ix_batch_partitions_steal_all ON batch_partitions (is_transferable, node_group, priority DESC, step_execution_id);
CREATE TABLE dbpartition_alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO dbpartition_alembic_version (version_num) VALUES ('0001');
