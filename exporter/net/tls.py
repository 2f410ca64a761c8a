"""TLS settings of outgoing connections, to vLLM's servers and to Alertmanager."""

import ssl
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from exporter.config import TlsConfig
from exporter.net.errors import RefusedError, system_error
from exporter.net.secret_files import file_stamp

__all__ = ["context"]


# The contexts in use, by their settings and the stamps of their files. Each takes 20 ms and a megabyte, so
# hundreds of targets with the same settings share one.
_CONTEXTS: WeakValueDictionary[Hashable, ssl.SSLContext] = WeakValueDictionary()


def context(tls: TlsConfig) -> ssl.SSLContext:
    """Make OpenSSL's form of the settings; equal settings with unchanged files share one.

    Raises RefusedError if a certificate or key cannot be loaded; the message names the option, and no path.
    """
    paths = (tls.ca_file or ssl.get_default_verify_paths().cafile, tls.cert_file, tls.key_file)
    key = (tls, *map(file_stamp, paths))
    shared = _CONTEXTS.get(key)
    if shared is None:
        shared = _CONTEXTS[key] = _make(tls)
    return shared


def _make(tls: TlsConfig) -> ssl.SSLContext:
    with _loading("ca_file"):
        context = ssl.create_default_context(cafile=tls.ca_file)
    if tls.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls.cert_file is not None:
        with _loading("cert_file or key_file"):
            # Without a callback OpenSSL would ask the terminal for an encrypted key's password.
            context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: "")
    return context


@contextmanager
def _loading(option: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as problem:
        raise RefusedError("tls", f"cannot load {option}: {problem.reason or 'not PEM'}") from problem
    except OSError as problem:
        raise RefusedError("tls", f"cannot load {option}: {system_error(problem.errno)}") from problem
