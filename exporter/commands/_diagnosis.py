"""Why a server cannot be read, and whose page it is that is not vLLM's, each with the next step."""

import re
from typing import Final

from exporter.net.errors import REASONS

__all__ = ["explain_error", "explain_page"]

_STEPS: Final = {
    "connection_refused": "Is vLLM running, and is this its host and port?",
    "connection_reset": "Look at the server's log; a proxy in between may close connections as well.",
    "timeout": "Does the server answer curl --max-time 5? A firewall or a server that hangs does not.",
    "dns": "Check the host name, and whether this machine can resolve it.",
    "tls": "Does that port speak TLS? If not, use http://; if so, set --target.tls.ca-file.",
    "redirect": "Use the address that it redirects to.",
    "unreachable": "Check the address and the network in between.",
    "protocol": "That port does not speak HTTP; check the port, and http:// against https://.",
    "http_401": "Set --target.bearer-token-file, or poll vLLM's own port behind the proxy.",
    "http_403": "The server or a proxy refuses this client; poll vLLM's own port.",
    "http_404": "vLLM's page is /metrics on the port of its API; check the path.",
}
_SERVER_FAULT: Final = "Look at the server's log; a proxy may answer in its place."
# The first that stands at the beginning of a line of the page names it.
_PAGES: Final = (
    (
        rb"\s*<(!doctype|!DOCTYPE|html|HTML)",
        "an HTML page",
        "vLLM's page is /metrics; check port and path.",
    ),
    (rb"vllm_pressure_", "this exporter's own page", "Give the address of vLLM, not of the exporter."),
    (rb"sglang[:_]", "the page of SGLang", "This exporter reads vLLM only."),
    (rb"tgi_", "the page of Text Generation Inference", "This exporter reads vLLM only."),
    (rb"trtllm_", "the page of TensorRT-LLM", "This exporter reads vLLM only."),
    (rb"node_(cpu|load|memory|filesystem)", "the page of node_exporter", "Check the port."),
)
_LOOKED_AT: Final = 1_000_000


def explain_error(error: str) -> tuple[str, str]:
    """Return the cause of a failed poll in a sentence, and the next step."""
    if error.startswith("http_"):
        return f"The server answers with HTTP status {error[5:]}.", _STEPS.get(error, _SERVER_FAULT)
    meaning = REASONS.get(error, "the answer is no metrics page")
    return f"{meaning[:1].upper()}{meaning[1:]}.", _STEPS.get(
        error, "Check the address, the port and the path."
    )


def explain_page(body: bytes | None) -> tuple[str, str] | None:
    """Return whose page a body is and the next step; None where it is vLLM's or not known."""
    if not body:
        return None
    page = body[:_LOOKED_AT]
    if re.search(rb"(?m)^(# (HELP|TYPE) )?(ray_)?vllm[:_](?!pressure_)", page):
        return None
    for pattern, name, step in _PAGES:
        if re.search(rb"(?m)^(# (HELP|TYPE) )?" + pattern, page):
            return f"This is {name}; it has no series of vLLM.", step
    return None
