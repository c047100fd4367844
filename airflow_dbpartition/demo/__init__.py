"""The demonstration: an embedded PostgreSQL, a real Airflow started as processes, and real input."""
