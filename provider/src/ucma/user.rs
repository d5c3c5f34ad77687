//! The program's memory, as the kernel reaches it: a bad address is EFAULT.

use std::ffi::c_int;
use std::sync::OnceLock;

use ferroce_engine::memory::Memory as _;
use ferroce_engine::memory::process::ProcessMemory;

use super::layout::Plain;

/// Errors are errno values.
pub type Result<T> = std::result::Result<T, c_int>;

fn memory() -> Result<&'static ProcessMemory> {
    static MEMORY: OnceLock<Option<ProcessMemory>> = OnceLock::new();
    MEMORY
        .get_or_init(|| ProcessMemory::new().ok())
        .as_ref()
        .ok_or(libc::ENOMEM)
}

/// Fills `into` from an address.
pub fn read_bytes(address: u64, into: &mut [u8]) -> Result<()> {
    memory()?.read(address, into).map_err(|_| libc::EFAULT)
}

/// The value at an address, which need not be aligned.
pub fn read<T: Plain>(address: u64) -> Result<T> {
    let mut value = T::zeroed();
    read_bytes(address, value.bytes_mut())?;
    Ok(value)
}

/// Stores bytes at an address.
pub fn write_bytes(address: u64, bytes: &[u8]) -> Result<()> {
    memory()?.write(address, bytes).map_err(|_| libc::EFAULT)
}

/// Stores a response, of which the program has room for `room` bytes.
pub fn write<T: Plain>(address: u64, value: &T, room: u16) -> Result<()> {
    let bytes = value.bytes();
    write_bytes(address, &bytes[..bytes.len().min(room.into())])
}

#[cfg(test)]
mod tests {
    use super::super::layout::rdma_ucm_listen;
    use super::*;

    #[test]
    fn odd_addresses_are_errors() {
        assert_eq!(read::<rdma_ucm_listen>(0).unwrap_err(), libc::EFAULT);
        assert_eq!(write_bytes(8, b"x"), Err(libc::EFAULT));
        let mut place = [7u8; 9];
        let address = place.as_mut_ptr() as u64;
        let value = rdma_ucm_listen { id: 1, backlog: 2 };
        assert_eq!(write(address + 1, &value, 100), Ok(()));
        assert_eq!(place, [7, 1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(write(address, &value, 4), Ok(()));
        assert_eq!(
            place,
            [1, 0, 0, 0, 0, 2, 0, 0, 0],
            "no more than there is room for"
        );
        let value: rdma_ucm_listen = read(address + 1).unwrap();
        assert_eq!((value.id, value.backlog), (0, 2), "not aligned");
    }
}
