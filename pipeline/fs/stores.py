"""Stores: connections to buckets, with the credentials that each cloud's own programs would use."""

import json
import os
from typing import Any


def find_address(bucket: str) -> str | None:
    """The address of the server of a bucket, by the environment; None: that of its cloud."""
    if bucket.startswith("s3://"):
        environment = os.environ
        return environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if bucket.startswith("gs://") and (address := os.environ.get("STORAGE_EMULATOR_HOST")):
        return address if "://" in address else f"http://{address}"
    return None


def open_bucket(bucket: str, retries: int, address: str | None) -> Any:
    """The store of a bucket at an address."""
    from obstore import store

    config: dict[str, Any] = {}
    if bucket.startswith("s3://"):
        # Not all servers delete several objects with one request.
        config = {"disable_bulk_delete": True} | _profile()
        if address:
            config["endpoint"] = address
    elif bucket.startswith("gs://") and address:
        account = {"gcs_base_url": address, "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        config["service_account_key"] = json.dumps(account)
    client: dict[str, Any] = {"timeout": "10 minutes", "connect_timeout": "10s"}
    client |= {"read_timeout": "30s", "allow_http": str(address).startswith("http://")}
    repeated = {"max_retries": retries}
    make: Any = store.from_url  # has a signature for each cloud
    return make(bucket, client_options=client, retry_config=repeated, **config)


def _profile() -> dict[str, Any]:
    """Credentials and region of a profile in ~/.aws, where boto3 is installed to read it."""
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_SKIP_SIGNATURE" in os.environ:
        return {}
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return {}
    session = boto3.Session()
    if session.get_credentials() is None:
        return {}
    found: dict[str, Any] = {"credential_provider": Boto3CredentialProvider(session)}
    return found | ({"region": session.region_name} if session.region_name else {})
