"""A worker that imports nothing: its processes start within a second."""

import os


class Devices:
    """Says which GPUs its process sees."""

    def devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")
