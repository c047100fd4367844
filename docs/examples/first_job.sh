#!/usr/bin/env bash
# The tutorial's first job, in the directory of greetings.py.
set -euo pipefail

# [start schema]
export DBPARTITION_DATABASE_URL=sqlite:///first-job.sqlite
dbpartition db upgrade
# [end schema]

# [start submit]
echo '{"ada": {"person": "Ada"}, "grace": {"person": "Grace"}, "edsger": {"person": "Edsger"}}' > people.json
dbpartition submit greet --partitions people.json
# [end submit]

# [start worker]
dbpartition worker --import greetings --drain
# [end worker]

# [start look]
dbpartition jobs
dbpartition partitions 1
dbpartition partitions 1 --json
# [end look]

# [start again]
dbpartition submit greet --partitions people.json --job-name greetings --parameters '{"day": "2026-12-01"}'
dbpartition submit greet --partitions people.json --job-name greetings --parameters '{"day": "2026-12-01"}'
dbpartition worker --import greetings --drain
# [end again]
