"""Alembic loads this file when its own command line is used; `dbpartition db upgrade` is the supported way."""

raise SystemExit("use `dbpartition db upgrade`: it keeps our own version table, schema and views")
