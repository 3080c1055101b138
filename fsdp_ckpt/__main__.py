"""``python -m fsdp_ckpt``."""

from __future__ import annotations

from fsdp_ckpt.cli.app import main

if __name__ == "__main__":
    main()
