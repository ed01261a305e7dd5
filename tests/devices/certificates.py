"""Certificates for tests, made by openssl: a server's, a client's, and that of a stranger."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

#: Also those that stand for other machines in tests.
LOOPBACKS = [f"IP:127.0.0.{number}" for number in range(1, 5)]

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def _openssl(*argv: object) -> None:
    subprocess.run(["openssl", *map(str, argv)], check=True, capture_output=True)


def write_pair(directory: Path, name: str, ca: str, dates: tuple[str, str] | None = None) -> None:
    """A key and a certificate for loopback, signed by a CA that is made on the way; good for two days, or
    between two dates ("20200131235959Z")."""
    key, cert, request = (directory / f"{name}.{end}" for end in ("key", "crt", "csr"))
    ca_key, ca_cert = directory / f"{ca}.key", directory / f"{ca}.crt"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    if not ca_cert.exists():
        _openssl("req", "-x509", *curve, "-keyout", ca_key, "-out", ca_cert, "-subj", f"/CN={ca}")
    _openssl("req", *curve, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
    extensions = directory / f"{name}.ext"
    extensions.write_text(f"subjectAltName=DNS:localhost,{','.join(LOOPBACKS)}\n")
    if dates is None:
        signing = ("-CA", ca_cert, "-CAkey", ca_key, "-CAcreateserial", "-days", 2, "-extfile", extensions)
        return _openssl("x509", "-req", "-in", request, "-out", cert, *signing)
    (directory / "index").touch()
    authority = directory / "ca.conf"
    authority.write_text(
        f"[ca]\ndefault_ca = it\n[it]\ndatabase = {directory}/index\nnew_certs_dir = {directory}\n"
        "rand_serial = yes\nunique_subject = no\ndefault_md = sha256\npolicy = any\n"
        "[any]\ncommonName = supplied\n"
    )
    signing = ("-batch", "-config", authority, "-cert", ca_cert, "-keyfile", ca_key, "-extfile", extensions)
    between = ("-startdate", dates[0], "-enddate", dates[1])
    _openssl("ca", *signing, *between, "-notext", "-in", request, "-out", cert)


def write_certificates(directory: Path) -> None:
    """server, client and stranger, each .crt and .key; ca.crt signed the first two."""
    write_pair(directory, "server", "ca")
    write_pair(directory, "client", "ca")
    write_pair(directory, "stranger", "other")
