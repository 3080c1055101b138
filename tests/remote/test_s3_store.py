"""The suite on S3, through s3fs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.remote.s3_server import Bucket
from tests.remote.store_suite import Place, StoreSuite


@dataclass(frozen=True)
class S3:
    bucket: Bucket

    def put(self, folder: Path, name: str) -> str:
        return self.bucket.upload(folder, name)

    def remove(self, url: str) -> None:
        self.bucket.delete(url.removeprefix(f"s3://{self.bucket.name}/"))


class TestS3(StoreSuite):
    @pytest.fixture
    def place(self, bucket: Bucket) -> Place:
        return S3(bucket)
