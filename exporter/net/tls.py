"""The TLS settings of connections to elsewhere: to vLLM's servers, and to Alertmanager."""

import ssl
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from exporter.config import TlsConfig
from exporter.net.errors import RefusedError, system_error
from exporter.net.secret_files import file_stamp

__all__ = ["context"]


# In use now, by their settings and the state of the files that they were made of. One takes 20 ms to make
# and a megabyte: of hundreds of targets with the same settings there must not be hundreds.
_CONTEXTS: WeakValueDictionary[Hashable, ssl.SSLContext] = WeakValueDictionary()


def context(tls: TlsConfig) -> ssl.SSLContext:
    """The settings as OpenSSL takes them, made anew only where they or a file of theirs is another.

    Raises:
        RefusedError: a certificate or key cannot be loaded; the message names the option, and no path.
    """
    paths = (tls.ca_file or ssl.get_default_verify_paths().cafile, tls.cert_file, tls.key_file)
    key = (tls, *map(file_stamp, paths))
    made = _CONTEXTS.get(key)
    if made is None:
        made = _CONTEXTS[key] = _made(tls)
    return made


def _made(tls: TlsConfig) -> ssl.SSLContext:
    with _loading("ca_file"):
        made = ssl.create_default_context(cafile=tls.ca_file)
    if tls.insecure_skip_verify:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    if tls.cert_file is not None:
        with _loading("cert_file or key_file"):
            # Without an own callback OpenSSL would ask the terminal for an encrypted key's password.
            made.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: "")
    return made


@contextmanager
def _loading(option: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as problem:
        raise RefusedError("tls", f"cannot load {option}: {problem.reason or 'not PEM'}") from problem
    except OSError as problem:
        raise RefusedError("tls", f"cannot load {option}: {system_error(problem.errno)}") from problem
