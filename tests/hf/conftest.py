"""These tests need the extra `hf`, which `make test` installs."""

from importlib.util import find_spec

NEEDS = {"test_*.py": "transformers", "test_training.py": "peft"}

collect_ignore_glob = [files for files, module in NEEDS.items() if find_spec(module) is None]
