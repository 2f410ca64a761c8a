"""Builds web configurations and their certificates."""

import ssl
from pathlib import Path

import bcrypt
import trustme

PASSWORD = "hunter2-is-not-shown"
# A random salt would change the names of tests from run to run.
HASH = bcrypt.hashpw(PASSWORD.encode(), b"$2b$04$abcdefghijklmnopqrstuu").decode()
USERS = f"basic_auth_users: {{alice: {HASH}}}\n"


class Pki:
    """An authority, and certificates of it in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.ca.cert_pem.write_to_path(str(folder / "ca.pem"))
        self.renew()

    def renew(self, name="127.0.0.1") -> None:
        """Create a new certificate of the server, in the same files."""
        made = self.ca.issue_cert(name)
        made.private_key_pem.write_to_path(str(self.folder / "cert.key"))
        made.cert_chain_pems[0].write_to_path(str(self.folder / "cert.pem"))

    def client(self, authority=None, version=None) -> ssl.SSLContext:
        """Return a client that trusts the authority, with a certificate of `authority`."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if authority is not None:
            authority.issue_cert("client@example.org").configure_cert(context)
        if version is not None:
            context.maximum_version = version
        return context


TLS = "tls_server_config: {cert_file: cert.pem, key_file: cert.key%s}\n"
VERIFIED = TLS % ", client_ca_file: ca.pem, client_auth_type: RequireAndVerifyClientCert"
