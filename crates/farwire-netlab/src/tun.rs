//! Makes a network namespace with a TUN device in it. Linux only offers these by system calls that
//! rustix does not wrap, so this file is the crate's only one with `unsafe` code. Its rules:
//!
//! 1. [`Ifreq`] has the size and layout of the kernel's `struct ifreq` on 64-bit Linux: 16 bytes of
//!    name, 24 bytes whose meaning depends on the request.
//! 2. Each request below reads at most an `Ifreq` and writes at most an `Ifreq`, so a pointer to
//!    one that this file owns is always valid.
//! 3. Only the network namespace is unshared, never the table of files.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;

use rustix::ioctl::{Opcode, Updater, ioctl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{UnshareFlags, unshare_unsafe};

const TUNSETIFF: Opcode = 0x4004_54ca;
const SIOCSIFFLAGS: Opcode = 0x8914;
const SIOCSIFADDR: Opcode = 0x8916;
const SIOCSIFNETMASK: Opcode = 0x891c;
const SIOCSIFMTU: Opcode = 0x8922;
const SIOCSIFTXQLEN: Opcode = 0x8943;
/// A TUN device that adds no header of its own to packets.
const IFF_TUN_NO_PI: u16 = 0x0001 | 0x1000;
const IFF_UP: u16 = 1;

/// The kernel's `struct ifreq`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Ifreq {
    name: [u8; 16],
    value: [u8; 24],
}

impl Ifreq {
    fn new(device: &str, value: &[u8]) -> Self {
        let mut request = Self { name: [0; 16], value: [0; 24] };
        request.name[..device.len()].copy_from_slice(device.as_bytes());
        request.value[..value.len()].copy_from_slice(value);
        request
    }

    /// A `sockaddr_in` without a port.
    fn address(device: &str, address: Ipv4Addr) -> Self {
        let mut value = [0; 16];
        value[..2].copy_from_slice(&2u16.to_ne_bytes()); // AF_INET
        value[4..8].copy_from_slice(&address.octets());
        Self::new(device, &value)
    }
}

fn request<const CODE: Opcode>(on: &OwnedFd, mut what: Ifreq) -> io::Result<()> {
    // SAFETY: rules 1 and 2: `what` is an `ifreq`, lives until the call returns, and is all that
    // the kernel reads or writes.
    unsafe { Ok(ioctl(on, Updater::<CODE, Ifreq>::new(&mut what))?) }
}

/// Moves this thread into a network namespace of its own, and returns a handle to it. The namespace
/// lasts as long as something holds it.
pub(crate) fn new_namespace() -> io::Result<File> {
    // SAFETY: rule 3; the call is unsafe for the sake of `FILES` alone.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET)? };
    File::open("/proc/thread-self/ns/net")
}

/// Makes a device in this thread's namespace, up, with an address in a network of 256. It vanishes
/// with its handle.
pub(crate) fn new_device(
    name: &str,
    address: Ipv4Addr,
    mtu: u32,
    queue: u32,
) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags, open};
    assert!(name.len() < 16, "names of devices are short");
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let device = open("/dev/net/tun", flags, Mode::empty())?;
    request::<TUNSETIFF>(&device, Ifreq::new(name, &IFF_TUN_NO_PI.to_ne_bytes()))?;
    let any = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    request::<SIOCSIFADDR>(&any, Ifreq::address(name, address))?;
    request::<SIOCSIFNETMASK>(&any, Ifreq::address(name, Ipv4Addr::new(255, 255, 255, 0)))?;
    request::<SIOCSIFMTU>(&any, Ifreq::new(name, &mtu.to_ne_bytes()))?;
    request::<SIOCSIFTXQLEN>(&any, Ifreq::new(name, &queue.to_ne_bytes()))?;
    for up in [name, "lo"] {
        request::<SIOCSIFFLAGS>(&any, Ifreq::new(up, &IFF_UP.to_ne_bytes()))?;
    }
    Ok(device)
}
