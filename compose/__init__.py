"""Runs a line: as local processes (`tokenline`), or as containers (docker-compose.yaml)."""
