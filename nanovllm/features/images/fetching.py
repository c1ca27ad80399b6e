"""Fetch an image by http(s): from hosts that the caller has named, never from this machine's own networks."""

import http.client
import ipaddress
import socket
import ssl
import time
from threading import Timer
from urllib.parse import quote, urlsplit

from nanovllm.checks.values import shorten
from nanovllm.features.images.sources import MAX_BYTES

MAX_SECONDS = 10.0  # for all of it; how long a name may take to be found, the system limits, too
READ_BYTES = 1 << 16
SAFE = "%/:=&?~#+!$,;'@()*[]"  # what a URL's path and query may have as it is
# All of IPv6 that anybody's hosts have is in here (iana.org/assignments/ipv6-address-space). The forms of an IPv4
# address in IPv6, which may be a private one, are outside, except for 6to4 and Teredo.
HOSTS_V6 = ipaddress.ip_network("2000::/3")
# Of protocols (Teredo is one), of documentation, of 6to4, of documentation; of protocols and 6to4's routers.
NO_HOSTS_V6 = [ipaddress.ip_network(network) for network in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]
NO_HOSTS_V4 = [ipaddress.ip_network(network) for network in ("192.0.0.0/24", "192.88.99.0/24")]


def fetch(url: str, domains: tuple[str, ...]) -> bytes:
    """The body. Raises ValueError for a host that is not in domains, and for whatever goes wrong.

    Redirects are not followed: where one leads has not been allowed.
    """
    if not domains:
        raise ValueError(
            "images are not fetched from the network; send a data: URL, or allow hosts with allowed_media_domains"
        )
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if host not in domains:
        raise ValueError(f"images are fetched from {', '.join(domains)}, not from {shorten(host)}")
    connection: http.client.HTTPConnection | None = None
    watchdog: Timer | None = None
    ends = time.monotonic() + MAX_SECONDS
    try:
        port = parts.port or (443 if parts.scheme.lower() == "https" else 80)
        connection = _connected(host, port, parts.scheme.lower() == "https", ends)
        watchdog = Timer(_seconds_left(ends), connection.sock.shutdown, [socket.SHUT_RDWR])  # however slowly it speaks
        watchdog.daemon = True
        watchdog.start()
        path = quote(parts.path or "/", safe=SAFE) + (f"?{quote(parts.query, safe=SAFE)}" if parts.query else "")
        connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "nanovllm"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"the host answers {response.status}")
        body = bytearray()
        while part := response.read1(READ_BYTES):
            body += part
            if len(body) > MAX_BYTES:
                raise ValueError(f"the image has more than {MAX_BYTES:,} bytes")
        _seconds_left(ends)  # what was cut off looks like the end of an answer that does not tell its length
        if response.length:
            raise ValueError(f"the answer ends {response.length:,} bytes early")
        return bytes(body)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ValueError(f"{shorten(url)} could not be fetched: {error}") from None
    finally:
        if watchdog is not None:
            watchdog.cancel()
        if connection is not None:
            connection.close()


def _seconds_left(ends: float) -> float:
    """Raises ValueError if there are none. ends: by time.monotonic()."""
    if (left := ends - time.monotonic()) <= 0:
        raise ValueError(f"it took more than {MAX_SECONDS:g} seconds")
    return left


def _connected(host: str, port: int, is_tls: bool, ends: float) -> http.client.HTTPConnection:
    """A connection to an address that was looked at: a name that is asked for twice may give two addresses."""
    address = _public_address(host, port)
    plain = socket.create_connection((address, port), timeout=_seconds_left(ends))
    if not is_tls:
        connection = http.client.HTTPConnection(host, port)
        connection.sock = plain
        return connection
    context = ssl.create_default_context()
    connection = http.client.HTTPSConnection(host, port, context=context)
    plain.settimeout(_seconds_left(ends))  # of a handshake as a whole
    connection.sock = context.wrap_socket(plain, server_hostname=host)
    return connection


def _public_address(host: str, port: int) -> str:
    *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    address = str(place[0])
    if not is_public(ipaddress.ip_address(address.partition("%")[0])):
        raise ValueError("its address belongs to a private network")
    return address


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Does it belong to a host of the internet, whatever this version of Python knows of it?"""
    if isinstance(address, ipaddress.IPv6Address):
        return address in HOSTS_V6 and not any(address in network for network in NO_HOSTS_V6)
    return address.is_global and not address.is_multicast and not any(address in network for network in NO_HOSTS_V4)
