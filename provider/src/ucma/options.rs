//! Options of ids (SET_OPTION).

use std::mem::size_of;

use ferroce_engine::rdma_cm::{IdOption, PathRecord};

use super::layout::{Plain, ib_path_rec_data, rdma_ucm_set_option};
use super::query;
use super::user::{self, Result};

/// `RDMA_OPTION_ID`, `RDMA_OPTION_IB`.
const LEVEL_ID: u32 = 0;
const LEVEL_IB: u32 = 1;
/// `RDMA_OPTION_ID_*`.
const TYPE_OF_SERVICE: u32 = 0;
const REUSE_ADDRESS: u32 = 1;
const FAMILY_ONLY: u32 = 2;
const ACK_TIMEOUT: u32 = 3;
/// `RDMA_OPTION_IB_PATH`.
const PATH: u32 = 1;
/// Most bytes of an option.
const MAX_LENGTH: u32 = 4 << 20;

/// The option that the program sets: ENOSYS for an unknown one, EINVAL for a wrong size.
pub(super) fn parse(argument: &rdma_ucm_set_option) -> Result<IdOption> {
    if argument.optlen > MAX_LENGTH {
        return Err(libc::EINVAL);
    }
    let mut value = vec![0; argument.optlen as usize];
    user::read_bytes(argument.optval, &mut value)?;
    let byte = || {
        <[u8; 1]>::try_from(&value[..])
            .map(|[byte]| byte)
            .map_err(|_| libc::EINVAL)
    };
    let flag = || {
        let int = <[u8; size_of::<i32>()]>::try_from(&value[..]).map_err(|_| libc::EINVAL)?;
        Ok(int != [0; 4])
    };
    match (argument.level, argument.optname) {
        (LEVEL_ID, TYPE_OF_SERVICE) => byte().map(IdOption::TypeOfService),
        (LEVEL_ID, REUSE_ADDRESS) => flag().map(IdOption::ReuseAddress),
        (LEVEL_ID, FAMILY_ONLY) => flag().map(IdOption::AddressFamilyOnly),
        (LEVEL_ID, ACK_TIMEOUT) => byte().map(IdOption::AckTimeout),
        (LEVEL_IB, PATH) => path(&value).map(IdOption::Path),
        _ => Err(libc::ENOSYS),
    }
}

/// The first path of a list that serves both directions: EINVAL if there is none.
fn path(records: &[u8]) -> Result<PathRecord> {
    const SIZE: usize = size_of::<ib_path_rec_data>();
    if !records.len().is_multiple_of(SIZE) {
        return Err(libc::EINVAL);
    }
    records
        .chunks_exact(SIZE)
        .map(|bytes| {
            let mut record = ib_path_rec_data::zeroed();
            record.bytes_mut().copy_from_slice(bytes);
            record
        })
        .find(|record| record.flags == query::PATH_FLAGS)
        .map(|record| query::unpack_path(&record.path_rec))
        .ok_or(libc::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(level: u32, optname: u32, value: &[u8]) -> Result<IdOption> {
        parse(&rdma_ucm_set_option {
            optval: value.as_ptr() as u64,
            id: 0,
            level,
            optname,
            optlen: value.len() as u32,
        })
    }

    #[test]
    fn options_of_ids() {
        assert_eq!(set(0, 0, &[8]), Ok(IdOption::TypeOfService(8)));
        assert_eq!(set(0, 0, &[8, 0]), Err(libc::EINVAL));
        assert_eq!(set(0, 1, &5i32.to_ne_bytes()), Ok(IdOption::ReuseAddress(true)));
        assert_eq!(set(0, 1, &[1]), Err(libc::EINVAL));
        assert_eq!(
            set(0, 2, &0i32.to_ne_bytes()),
            Ok(IdOption::AddressFamilyOnly(false))
        );
        assert_eq!(set(0, 3, &[17]), Ok(IdOption::AckTimeout(17)));
        assert_eq!(set(0, 3, &[]), Err(libc::EINVAL));
        assert_eq!(set(0, 4, &[0]), Err(libc::ENOSYS));
        assert_eq!(set(2, 0, &[0]), Err(libc::ENOSYS));
        let bad = rdma_ucm_set_option {
            optval: 8,
            id: 0,
            level: 0,
            optname: 0,
            optlen: 1,
        };
        assert_eq!(parse(&bad), Err(libc::EFAULT));
        assert_eq!(
            parse(&rdma_ucm_set_option {
                optlen: u32::MAX,
                ..bad
            }),
            Err(libc::EINVAL)
        );
    }

    #[test]
    fn a_path_of_the_program() {
        let record = PathRecord {
            dest_gid: [1; 16],
            source_gid: [2; 16],
            service_id: 0x0106_1d2f,
            flow_label: 0x12345,
            hop_limit: 64,
            traffic_class: 8,
            pkey: 0xffff,
            sl: 3,
            mtu: 3,
            rate: 7,
            packet_life_time: 18,
        };
        let mut data = ib_path_rec_data {
            flags: query::PATH_FLAGS,
            reserved: 0,
            path_rec: query::pack_path(&record),
        };
        data.path_rec[..8].copy_from_slice(&record.service_id.to_be_bytes());
        let mut other = data;
        other.flags = 1;
        let list = [other.bytes(), data.bytes()].concat();
        assert_eq!(set(1, 1, &list), Ok(IdOption::Path(record)));
        assert_eq!(set(1, 1, &list[1..]), Err(libc::EINVAL));
        assert_eq!(
            set(1, 1, &list[..72]),
            Err(libc::EINVAL),
            "none of both directions"
        );
        assert_eq!(set(1, 1, &[]), Err(libc::EINVAL));
        assert_eq!(set(1, 0, &list), Err(libc::ENOSYS));
    }
}
