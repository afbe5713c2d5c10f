"""TLS of the gRPC server, with certificates that are read again when their files change."""

from pathlib import Path

import grpc

from gateway.config import GrpcConfig
from scheduler.errors import StartError
from scheduler.fault_log import log_fault


def server_credentials(own: GrpcConfig) -> grpc.ServerCredentials | None:
    """TLS with the files of the configuration, read again at a handshake after they changed; None without TLS.

    With a CA, clients need a certificate of it. Raises StartError for an unreadable file.
    """
    if own.tls_cert is None or own.tls_key is None:
        return None
    files = CertificateFiles(own.tls_cert, own.tls_key, own.tls_ca)
    try:
        first = files.read()
    except OSError as error:
        raise StartError(f"Cannot read {error.filename} for gRPC: {error.strerror}.") from error
    return grpc.dynamic_ssl_server_credentials(first, files.changed, own.tls_ca is not None)  # type: ignore[arg-type]  # None: unchanged


class CertificateFiles:
    """The files of a certificate, its key, and the CA of clients."""

    def __init__(self, cert: Path, key: Path, ca: Path | None) -> None:
        self._cert, self._key, self._ca = cert, key, ca
        self._seen: tuple[int, ...] = ()

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Their contents. Raises OSError."""
        self._seen = self._times()
        pair = (self._key.read_bytes(), self._cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], self._ca.read_bytes() if self._ca else None)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Their contents if they changed since they were read; None if not, or while they cannot be read."""
        try:
            return self.read() if self._times() != self._seen else None
        except OSError as error:
            log_fault("a certificate cannot be read; the last one is used", error)
            return None

    def _times(self) -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in (self._cert, self._key, self._ca) if path is not None)
