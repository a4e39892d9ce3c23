"""Settles how torch's threads wait before any test module here imports torch."""

import engine_svc.compute  # noqa: F401
