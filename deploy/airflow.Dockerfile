# Airflow with this package: for the scheduler, the DAG processor, the triggerer and the API server alike.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY airflow_dbpartition ./airflow_dbpartition
COPY sql ./sql
COPY dags ./dags
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM apache/airflow:3.3.2
COPY --from=build /wheels /wheels
# Airflow's version is named again, so that pip cannot replace it.
RUN pip install --no-cache-dir "apache-airflow==${AIRFLOW_VERSION}" "$(ls /wheels/*.whl)[airflow]"
