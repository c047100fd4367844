# A worker: this package without Airflow. Build it in the repository's top directory:
#   docker build -f deploy/worker.Dockerfile -t dbpartition-worker .
# Your steps come in a layer on top (see docs/how-to/deploy-workers.md), or as a mounted directory on /steps.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY airflow_dbpartition ./airflow_dbpartition
COPY sql ./sql
COPY dags ./dags
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl \
    && useradd --uid 10001 --create-home worker \
    && mkdir /steps
ENV PYTHONUNBUFFERED=1 \
    DBPARTITION_HEALTH_PORT=8080 \
    DBPARTITION_LOG_FORMAT=json
WORKDIR /steps
USER 10001
EXPOSE 8080
# Exec form: the worker itself gets the SIGTERM, and drains.
STOPSIGNAL SIGTERM
ENTRYPOINT ["dbpartition"]
CMD ["worker"]
