"""Which addresses are public, and which addresses an allow-listed block permits."""

from ipaddress import ip_network

import pytest

from anabranch.network.addresses import AddressGuard

PUBLIC = ["8.8.8.8", "93.184.216.34", "172.32.0.1", "2606:4700:4700::1111", "2a00:1450::1", "::ffff:8.8.8.8"]
NOT_PUBLIC = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0:127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b:1::7f00:1",
    "100::1",
    "2001::7f00:1",
    "2001:db8::1",
    "2002:7f00:1::",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "::1%1",
    "::ffff:127.0.0.1%1",
]
NO_ADDRESS = ["", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "8.8.8.8 ", "8.8.8.8.", "[::1]"]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_permitted(address: str) -> None:
    assert AddressGuard().permits(address)


@pytest.mark.parametrize("address", NOT_PUBLIC + NO_ADDRESS)
def test_private_and_special_addresses_are_refused(address: str) -> None:
    assert not AddressGuard().permits(address)


def test_an_allowed_block_permits_only_its_addresses() -> None:
    guard = AddressGuard([ip_network("10.1.2.0/24"), ip_network("fd00:1::/64")])
    assert all(map(guard.permits, ["10.1.2.0", "10.1.2.255", "::ffff:10.1.2.3", "fd00:1::1", "8.8.8.8"]))
    outside = ["10.1.1.255", "10.1.3.0", "127.0.0.1", "::ffff:10.1.3.0", "64:ff9b::a01:203", "2002:a01:203::", "::1"]
    assert not any(map(guard.permits, [*outside, "::10.1.2.3", "fd00:1:0:1::1"]))
