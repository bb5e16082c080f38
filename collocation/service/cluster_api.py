"""The API server of the cluster that the service runs in, as far as it is needed: it makes ResourceClaimTemplates."""

import asyncio
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vramcast.collocation.adapters.claims import API
from vramcast.collocation.service.breaker import Breaker
from vramcast.errors import UserError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The token and the CA that Kubernetes mounts into a pod; VRAMCAST_CLUSTER_ACCOUNT names another folder."""
_SECONDS = 0.5
_THREADS = 4


class ClusterApi:
    """A client of the API server. After a failure it asks nothing for ten seconds."""

    def __init__(self, url: str, account: Path = ACCOUNT) -> None:
        self._url = url
        self._account = account
        self._breaker = Breaker()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="cluster-api")

    @classmethod
    def of_environment(cls) -> "ClusterApi | None":
        """Return the API of the cluster around this pod; None outside of a cluster, or without an account."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        account = Path(os.environ.get("VRAMCAST_CLUSTER_ACCOUNT", ACCOUNT))
        if not host or not (account / "token").is_file():
            return None
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", account)

    async def make_template(self, namespace: str, template: Mapping[str, Any]) -> None:
        """Make a ResourceClaimTemplate unless it exists. Raise `UserError` if that fails."""
        if self._breaker.is_open:
            raise UserError("expected an API server that answers, found none a moment ago: make a claim by hand")
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._post, namespace, template)
        except (OSError, ValueError) as error:
            reason = type(error).__name__
            if isinstance(error, urllib.error.HTTPError):
                reason = f"status {error.code}"
            else:  # a refusal may be of one namespace alone
                self._breaker.failed()
            raise UserError(
                f"expected to make a ResourceClaimTemplate in {namespace}, found {reason}: check the service's role"
            ) from error

    def close(self) -> None:
        """Leave calls that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _post(self, namespace: str, template: Mapping[str, Any]) -> None:
        request = urllib.request.Request(  # noqa: S310
            f"{self._url}/apis/{API}/namespaces/{quote(namespace, safe='')}/resourceclaimtemplates",
            json.dumps(template).encode(),
            {
                "Authorization": f"Bearer {(self._account / 'token').read_text(encoding='ascii').strip()}",
                "Content-Type": "application/json",
            },
        )
        try:
            self._opener().open(request, timeout=_SECONDS).close()
        except urllib.error.HTTPError as error:
            if error.code != 409:  # it exists
                raise

    def _opener(self) -> urllib.request.OpenerDirector:
        """Return an opener that uses no proxy, and reads the CA again, since it may have been renewed."""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self._url.startswith("https"):
            tls = ssl.create_default_context(cafile=self._account / "ca.crt")
            handlers.append(urllib.request.HTTPSHandler(context=tls))
        return urllib.request.build_opener(*handlers)
