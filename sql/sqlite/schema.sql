-- sqlite: printed by `dbpartition db sql --dialect sqlite`; do not edit.
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
    created_time DATETIME NOT NULL,
    last_heartbeat DATETIME NOT NULL,
    CONSTRAINT pk_batch_nodes PRIMARY KEY (node_id),
    CONSTRAINT ck_batch_nodes_status CHECK (status IN ('ACTIVE', 'DRAINING', 'UNREACHABLE', 'REMOVED'))
);
CREATE INDEX ix_batch_nodes_status ON batch_nodes (status, node_group);
CREATE TABLE batch_job_instances (
    job_instance_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    job_name VARCHAR(250) NOT NULL,
    job_key VARCHAR(64) NOT NULL,
    generation INTEGER NOT NULL,
    parameters JSON NOT NULL,
    created_time DATETIME NOT NULL,
    CONSTRAINT uq_batch_job_instances_identity UNIQUE (job_name, job_key, generation)
);
CREATE TABLE batch_partition_events (
    event_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    step_execution_id BIGINT NOT NULL,
    job_execution_id BIGINT NOT NULL,
    event VARCHAR(20) NOT NULL,
    node_id VARCHAR(200),
    version INTEGER NOT NULL,
    event_time DATETIME NOT NULL,
    message TEXT
);
CREATE INDEX ix_batch_partition_events_job_execution_id ON batch_partition_events (job_execution_id);
CREATE INDEX ix_batch_partition_events_step_execution_id ON batch_partition_events (step_execution_id);
CREATE TABLE batch_job_executions (
    job_execution_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
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
    deadline DATETIME,
    run_partition_key VARCHAR(250),
    create_time DATETIME NOT NULL,
    start_time DATETIME,
    end_time DATETIME,
    last_updated DATETIME NOT NULL,
    stop_requested SMALLINT NOT NULL,
    exit_message TEXT,
    CONSTRAINT uq_batch_job_executions_active_instance_id UNIQUE (active_instance_id),
    CONSTRAINT ck_batch_job_executions_status CHECK (status IN ('STARTING', 'STARTED', 'STOPPING', 'COMPLETED', 'FAILED', 'STOPPED', 'ABANDONED')),
    CONSTRAINT ck_batch_job_executions_stop_requested CHECK (stop_requested IN (0, 1)),
    CONSTRAINT ck_batch_job_executions_active CHECK ((active_instance_id IS NOT NULL) = (status IN ('STARTING', 'STARTED', 'STOPPING'))),
    CONSTRAINT fk_batch_job_executions_job_instance_id FOREIGN KEY(job_instance_id) REFERENCES batch_job_instances (job_instance_id)
);
CREATE INDEX ix_batch_job_executions_job_instance_id ON batch_job_executions (job_instance_id);
CREATE TABLE batch_partitions (
    step_execution_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
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
    available_at DATETIME NOT NULL,
    execution_context JSON NOT NULL,
    checkpoint JSON,
    result JSON,
    read_count BIGINT DEFAULT '0' NOT NULL,
    write_count BIGINT DEFAULT '0' NOT NULL,
    filter_count BIGINT DEFAULT '0' NOT NULL,
    skip_count BIGINT DEFAULT '0' NOT NULL,
    commit_count BIGINT DEFAULT '0' NOT NULL,
    rollback_count BIGINT DEFAULT '0' NOT NULL,
    create_time DATETIME NOT NULL,
    claim_time DATETIME,
    end_time DATETIME,
    last_updated DATETIME NOT NULL,
    exit_message TEXT,
    CONSTRAINT uq_batch_partitions_key UNIQUE (job_execution_id, partition_key),
    CONSTRAINT ck_batch_partitions_status CHECK (status IN ('PENDING', 'CLAIMED', 'COMPLETED', 'FAILED', 'STOPPED')),
    CONSTRAINT ck_batch_partitions_is_transferable CHECK (is_transferable IN (0, 1)),
    CONSTRAINT ck_batch_partitions_transfer_policy CHECK (transfer_policy IN ('always', 'until_started', 'never')),
    CONSTRAINT ck_batch_partitions_claimed_has_owner CHECK (status <> 'CLAIMED' OR assigned_node IS NOT NULL),
    CONSTRAINT fk_batch_partitions_job_execution_id FOREIGN KEY(job_execution_id) REFERENCES batch_job_executions (job_execution_id)
);
CREATE INDEX ix_batch_partitions_execution_status ON batch_partitions (job_execution_id, status);
CREATE INDEX ix_batch_partitions_free ON batch_partitions (node_group, priority DESC, step_execution_id) WHERE status = 'PENDING' AND assigned_node IS NULL;
CREATE INDEX ix_batch_partitions_held ON batch_partitions (assigned_node) WHERE status = 'CLAIMED';
CREATE INDEX ix_batch_partitions_own ON batch_partitions (assigned_node, priority DESC, step_execution_id) WHERE status = 'PENDING' AND assigned_node IS NOT NULL;
CREATE INDEX ix_batch_partitions_steal ON batch_partitions (node_group, priority DESC, step_execution_id) WHERE status = 'PENDING' AND is_transferable = 1 AND assigned_node IS NOT NULL;
CREATE TABLE dbpartition_alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO dbpartition_alembic_version (version_num) VALUES ('0001');
