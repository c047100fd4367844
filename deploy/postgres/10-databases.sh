#!/bin/sh
# Run once by the postgres image, on an empty data directory: one database and one user for Airflow, and of each for us.
set -eu
psql --set=ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres \
    --set=airflow_password="$AIRFLOW_DATABASE_PASSWORD" \
    --set=repository_password="$REPOSITORY_DATABASE_PASSWORD" <<'SQL'
CREATE ROLE airflow LOGIN PASSWORD :'airflow_password';
CREATE DATABASE airflow OWNER airflow;
CREATE ROLE dbpartition LOGIN PASSWORD :'repository_password';
CREATE DATABASE dbpartition OWNER dbpartition;
SQL
