"""Partitioned jobs for Airflow, coordinated by nothing but a relational database.

Nothing is imported here: a worker must not pay for Airflow, nor a DAG for the worker.
"""
