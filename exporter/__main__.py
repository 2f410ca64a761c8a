"""``python -m exporter`` is the command ``vllm-preemption-exporter``."""

import sys

from exporter.cli import main

if __name__ == "__main__":
    sys.exit(main())
