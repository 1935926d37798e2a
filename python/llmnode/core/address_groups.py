"""Groups of addresses: peer ids are free, and addresses are not, so strangers count by where they are."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=4096)
def address_groups(address: str) -> tuple[str, str]:
    """The network that one owner is likely to have at hand, and the narrower one within which it is one machine.

    For public IPv4 addresses these are the /24 and the address; for IPv6 the /48 and the /56. In private networks, and
    on one's own machine, addresses are given by hand: each is a group of its own. `address` may be another name, as of
    a relay.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address, address
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.version == 4:
        return (_network(ip, 24), str(ip)) if ip.is_global else (str(ip), str(ip))
    return (_network(ip, 48), _network(ip, 56)) if ip.is_global else (_network(ip, 64), _network(ip, 64))


@lru_cache(maxsize=4096)
def announced_group(address: str) -> str | None:
    """The group of the first IP address in a multiaddr: that of the peer, or of its relay. None without one."""
    parts = address.split("/")
    return address_groups(parts[2])[0] if len(parts) > 2 and parts[1] in ("ip4", "ip6") else None


def _network(ip: ipaddress.IPv4Address | ipaddress.IPv6Address, bits: int) -> str:
    return str(ipaddress.ip_network((ip, bits), strict=False))
