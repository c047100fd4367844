-- [start roles]
CREATE ROLE worker LOGIN PASSWORD 'change-me' IN ROLE dbpartition_worker;
CREATE ROLE airflow_tasks LOGIN PASSWORD 'change-me' IN ROLE dbpartition_manager;
CREATE ROLE dashboards LOGIN PASSWORD 'change-me' IN ROLE dbpartition_reader;
CREATE ROLE nightly_purge LOGIN PASSWORD 'change-me' IN ROLE dbpartition_retention;
-- [end roles]
