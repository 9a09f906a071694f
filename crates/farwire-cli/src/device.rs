//! `--device`: where vectors are.

/// The CPU, or NVIDIA's cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Cpu,
    Cuda,
}

impl Device {
    pub(crate) const NAMES: [&'static str; 2] = ["cpu", "cuda"];

    pub(crate) fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl std::str::FromStr for Device {
    type Err = UnknownDevice;

    fn from_str(name: &str) -> Result<Self, UnknownDevice> {
        let all = [Self::Cpu, Self::Cuda];
        let named = all.into_iter().find(|device| device.name() == name);
        named.ok_or_else(|| UnknownDevice(name.into()))
    }
}

/// Not the name of a device.
#[derive(Clone, Debug, thiserror::Error)]
#[error("`{0}` is not a device; accepted: cpu, cuda")]
pub(crate) struct UnknownDevice(String);

/// The card of a rank among those of its host: ranks take them in turn.
#[cfg(feature = "cuda")]
pub(crate) fn card_of(comm: &farwire::Communicator) -> Result<usize, farwire_cuda::DeviceError> {
    let local = std::env::var("LOCAL_RANK").ok().and_then(|rank| rank.parse().ok());
    Ok(local.unwrap_or(comm.rank()) % farwire_cuda::cards()?.len().max(1))
}
