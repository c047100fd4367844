"""`python -m airflow_dbpartition.cli`."""

from airflow_dbpartition.cli import main

main()
