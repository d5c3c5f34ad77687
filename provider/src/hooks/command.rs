//! The command descriptor of a context: the commands of the kernel interface that libibverbs gives itself.
//!
//! Two have no op in the provider: making a completion channel, and reading the GID table. The rest is refused, with
//! the errors that make libibverbs take another way (sysfs) or say that it is not supported.

use std::ffi::{c_int, c_ulong, c_void};
use std::os::fd::RawFd;

use super::descriptors::Descriptor;
use crate::abi::verbs::ibv_gid_entry;

/// `IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL`.
const CREATE_COMP_CHANNEL: u32 = 17;
/// `RDMA_VERBS_IOCTL`: read and write, 24 bytes, type 0x1b, number 1.
const VERBS_IOCTL: c_ulong = 0xc018_1b01;
/// `UVERBS_OBJECT_DEVICE`.
const OBJECT_DEVICE: u16 = 0;
/// `UVERBS_METHOD_INVOKE_WRITE`.
const INVOKE_WRITE: u16 = 0;
/// `UVERBS_METHOD_QUERY_GID_TABLE`.
const QUERY_GID_TABLE: u16 = 5;
/// `UVERBS_METHOD_QUERY_GID_ENTRY`.
const QUERY_GID_ENTRY: u16 = 6;

/// What a context answers to commands. Errors are errno values.
pub trait Commands: Send + Sync + 'static {
    /// Makes a completion channel; gives its descriptor.
    fn create_channel(&self) -> Result<RawFd, c_int>;
    /// The used entries of the GID table.
    fn gids(&self) -> Vec<ibv_gid_entry>;
    /// Number of entries that the GID table has, holes included.
    fn gid_table_len(&self) -> u32;
}

/// The command descriptor of a context.
pub struct CommandDescriptor<C>(pub std::sync::Weak<C>);

/// `struct ib_uverbs_ioctl_hdr`, followed by the attributes.
#[repr(C)]
struct IoctlHeader {
    length: u16,
    object: u16,
    method: u16,
    attributes: u16,
    reserved1: u64,
    driver: u32,
    reserved2: u32,
}

/// `struct ib_uverbs_attr`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Attribute {
    id: u16,
    len: u16,
    flags: u16,
    reserved: u16,
    /// The value itself where it has at most 8 bytes, otherwise where it lies; where to put it for an output.
    data: u64,
}

impl Attribute {
    /// Stores an output value: as much of it as there is room for, zeros beyond it.
    ///
    /// # Safety
    /// The attribute must be an output that points to `len` bytes.
    unsafe fn store(&self, value: &[u8]) {
        // SAFETY: the caller says so.
        let room = unsafe { std::slice::from_raw_parts_mut(self.data as *mut u8, self.len.into()) };
        let (head, tail) = room.split_at_mut(value.len().min(room.len()));
        head.copy_from_slice(&value[..head.len()]);
        tail.fill(0);
    }

    /// The low half of a value that the attribute holds itself: a `u32`, or a `u64` that is small.
    fn small(&self) -> u32 {
        self.data as u32
    }
}

/// The bytes of a GID entry.
fn entry_bytes(entry: &ibv_gid_entry) -> [u8; size_of::<ibv_gid_entry>()] {
    let mut bytes = [0; size_of::<ibv_gid_entry>()];
    bytes[..16].copy_from_slice(&entry.gid);
    let numbers = [
        entry.gid_index,
        entry.port_num,
        entry.gid_type,
        entry.ndev_ifindex,
    ];
    for (chunk, number) in bytes[16..].chunks_exact_mut(4).zip(numbers) {
        chunk.copy_from_slice(&number.to_ne_bytes());
    }
    bytes
}

impl<C: Commands> Descriptor for CommandDescriptor<C> {
    fn write(&self, bytes: &[u8]) -> Option<Result<(), c_int>> {
        let Some(context) = self.0.upgrade() else {
            return Some(Err(libc::EIO));
        };
        // A command, its size and that of its response in words, then (of this command) where the response goes.
        let word = |at: usize| {
            bytes
                .get(at..at + 4)
                .map(|b| u32::from_ne_bytes(b.try_into().unwrap_or_default()))
        };
        let (Some(CREATE_COMP_CHANNEL), Some(low), Some(high)) = (word(0), word(8), word(12)) else {
            return Some(Err(libc::EOPNOTSUPP));
        };
        let response = (u64::from(high) << 32 | u64::from(low)) as *mut c_int;
        Some(context.create_channel().map(|fd| {
            // SAFETY: the command says that its response, a descriptor, goes there.
            unsafe { response.write_unaligned(fd) };
        }))
    }

    unsafe fn ioctl(&self, request: c_ulong, argument: *mut c_void) -> Option<Result<(), c_int>> {
        if request != VERBS_IOCTL || argument.is_null() {
            return None;
        }
        let Some(context) = self.0.upgrade() else {
            return Some(Err(libc::EIO));
        };
        let header = argument.cast::<IoctlHeader>();
        // SAFETY: the request has a header, followed by as many attributes as that says.
        let (method, attributes) = unsafe {
            let IoctlHeader {
                object,
                method,
                attributes,
                ..
            } = header.read_unaligned();
            if object != OBJECT_DEVICE {
                return Some(Err(libc::EPROTONOSUPPORT));
            }
            (
                method,
                std::slice::from_raw_parts(header.add(1).cast::<Attribute>(), attributes.into()),
            )
        };
        let attribute = |id| {
            attributes
                .iter()
                .find(|a| a.id == id)
                .copied()
                .ok_or(libc::EINVAL)
        };
        Some(match method {
            // SAFETY: as the caller says.
            INVOKE_WRITE => unsafe { invoke_write(&*context, attribute) },
            // SAFETY: as the caller says.
            QUERY_GID_ENTRY => unsafe { query_gid_entry(&*context, attribute) },
            // SAFETY: as the caller says.
            QUERY_GID_TABLE => unsafe { query_gid_table(&*context, attribute) },
            _ => Err(libc::EPROTONOSUPPORT),
        })
    }
}

/// A command of the `write` interface inside an ioctl, as some builds of libibverbs do it.
///
/// # Safety
/// The attributes must be those of the method.
unsafe fn invoke_write(
    context: &impl Commands,
    attribute: impl Fn(u16) -> Result<Attribute, c_int>,
) -> Result<(), c_int> {
    const CORE_OUT: u16 = 1;
    const WRITE_CMD: u16 = 2;
    if attribute(WRITE_CMD)?.small() != CREATE_COMP_CHANNEL {
        // Asked when a context is made, to see whether this way exists. Better it takes `write`.
        return Err(libc::EPROTONOSUPPORT);
    }
    let response = attribute(CORE_OUT)?;
    let fd = context.create_channel()?;
    // SAFETY: the response is an output.
    unsafe { response.store(&fd.to_ne_bytes()) };
    Ok(())
}

/// One entry of the GID table: ENODATA if it is not used, EINVAL if there is none of that number.
///
/// # Safety
/// The attributes must be those of the method.
unsafe fn query_gid_entry(
    context: &impl Commands,
    attribute: impl Fn(u16) -> Result<Attribute, c_int>,
) -> Result<(), c_int> {
    let (port, index, flags, response) = (attribute(0)?, attribute(1)?, attribute(2)?, attribute(3)?);
    if port.small() != 1 || flags.small() != 0 || index.small() >= context.gid_table_len() {
        return Err(libc::EINVAL);
    }
    let gids = context.gids();
    let entry = gids
        .iter()
        .find(|entry| entry.gid_index == index.small())
        .ok_or(libc::ENODATA)?;
    // SAFETY: the response is an output.
    unsafe { response.store(&entry_bytes(entry)) };
    Ok(())
}

/// All used entries of the GID table: EINVAL if they do not fit.
///
/// # Safety
/// The attributes must be those of the method.
unsafe fn query_gid_table(
    context: &impl Commands,
    attribute: impl Fn(u16) -> Result<Attribute, c_int>,
) -> Result<(), c_int> {
    let (size, flags, entries, count) = (attribute(0)?, attribute(1)?, attribute(2)?, attribute(3)?);
    let size = size.small() as usize;
    let gids = context.gids();
    if size == 0 || flags.small() != 0 || gids.len() > usize::from(entries.len) / size {
        return Err(libc::EINVAL);
    }
    for (at, entry) in gids.iter().enumerate() {
        let slot = Attribute {
            len: size as u16,
            data: entries.data + (at * size) as u64,
            ..entries
        };
        // SAFETY: the slot lies within the output, as was checked.
        unsafe { slot.store(&entry_bytes(entry)) };
    }
    // SAFETY: the count is an output.
    unsafe { count.store(&(gids.len() as u64).to_ne_bytes()) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    struct Fake;
    impl Commands for Fake {
        fn create_channel(&self) -> Result<RawFd, c_int> {
            Ok(77)
        }
        fn gids(&self) -> Vec<ibv_gid_entry> {
            [0, 2]
                .map(|n| ibv_gid_entry {
                    gid: [n as u8 + 1; 16],
                    gid_index: n,
                    port_num: 1,
                    gid_type: 2,
                    ndev_ifindex: 5,
                })
                .into()
        }
        fn gid_table_len(&self) -> u32 {
            4
        }
    }

    fn ioctl(method: u16, attributes: &[(u16, usize, u64)]) -> Result<(), c_int> {
        #[repr(C)]
        struct Request {
            header: IoctlHeader,
            attributes: [Attribute; 4],
        }
        let mut request = Request {
            header: IoctlHeader {
                length: 0,
                object: OBJECT_DEVICE,
                method,
                attributes: attributes.len() as u16,
                reserved1: 0,
                driver: 0,
                reserved2: 0,
            },
            attributes: [Attribute {
                id: 0,
                len: 0,
                flags: 1,
                reserved: 0,
                data: 0,
            }; 4],
        };
        for (slot, (id, len, data)) in request.attributes.iter_mut().zip(attributes) {
            (slot.id, slot.len, slot.data) = (*id, *len as u16, *data);
        }
        let context = Arc::new(Fake);
        let descriptor = CommandDescriptor(Arc::downgrade(&context));
        // SAFETY: the request is laid out as the kernel interface says.
        unsafe { descriptor.ioctl(VERBS_IOCTL, (&raw mut request).cast()) }.unwrap()
    }

    #[test]
    fn command_17_gives_a_descriptor() {
        let context = Arc::new(Fake);
        let descriptor = CommandDescriptor(Arc::downgrade(&context));
        let mut response: c_int = -1;
        let mut command = Vec::new();
        command.extend(17u32.to_ne_bytes());
        command.extend([4u16.to_ne_bytes(), 1u16.to_ne_bytes()].concat());
        command.extend((&raw mut response as u64).to_ne_bytes());
        assert_eq!(descriptor.write(&command), Some(Ok(())));
        assert_eq!(response, 77);
        assert_eq!(descriptor.write(&command[..8]), Some(Err(libc::EOPNOTSUPP)));
        command[0] = 3;
        assert_eq!(descriptor.write(&command), Some(Err(libc::EOPNOTSUPP)));
        drop(context);
        assert_eq!(descriptor.write(&command), Some(Err(libc::EIO)));
    }

    #[test]
    fn a_gid_entry_or_why_there_is_none() {
        let mut entry = [0xffu8; 40];
        let mut query = |port: u64, index: u64| {
            let out = entry.as_mut_ptr() as u64;
            ioctl(
                QUERY_GID_ENTRY,
                &[(0, 8, port), (1, 8, index), (2, 4, 0), (3, 40, out)],
            )
        };
        assert_eq!(query(1, 1), Err(libc::ENODATA));
        assert_eq!(query(1, 4), Err(libc::EINVAL));
        assert_eq!(query(2, 0), Err(libc::EINVAL));
        assert_eq!(query(1, 2), Ok(()));
        assert_eq!(&entry[..16], &[3; 16]);
        assert_eq!(entry[16..20], 2u32.to_ne_bytes());
        assert_eq!(entry[24..28], 2u32.to_ne_bytes());
        assert_eq!(entry[32..], [0; 8], "what this version does not know is zero");
    }

    #[test]
    fn the_gid_table_if_it_fits() {
        let mut table = [0u8; 64];
        let mut count = 9u64;
        let mut query = |len: usize| {
            let attributes = [
                (0, 8, 32),
                (1, 4, 0),
                (2, len, table.as_mut_ptr() as u64),
                (3, 8, &raw mut count as u64),
            ];
            ioctl(QUERY_GID_TABLE, &attributes)
        };
        assert_eq!(query(63), Err(libc::EINVAL));
        assert_eq!(query(64), Ok(()));
        assert_eq!(count, 2);
        assert_eq!((table[0], table[32]), (1, 3));
    }

    #[test]
    fn other_methods_are_refused_so_that_libibverbs_takes_another_way() {
        assert_eq!(ioctl(3, &[]), Err(libc::EPROTONOSUPPORT));
        assert_eq!(ioctl(INVOKE_WRITE, &[(2, 8, 3)]), Err(libc::EPROTONOSUPPORT));
        let mut fd: c_int = 0;
        assert_eq!(
            ioctl(INVOKE_WRITE, &[(2, 8, 17), (1, 4, &raw mut fd as u64)]),
            Ok(())
        );
        assert_eq!(fd, 77);
    }
}
