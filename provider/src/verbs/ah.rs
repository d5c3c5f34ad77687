//! Address handles: an address vector, resolved when it is made.

use std::ffi::c_int;

use ferroce_engine::link::Path;
use ferroce_engine::verbs::VerbsError;

use super::context::{Context, PORT};
use super::pd::Pd;
use super::uses::Use;
use super::{make, next_handle, verb};
use crate::abi::verbs::{ibv_ah, ibv_ah_attr, ibv_global_route, ibv_pd};

/// An address handle; begins as `struct ibv_ah`.
#[repr(C)]
pub struct Ah {
    public: ibv_ah,
    path: Path,
    _domain: Use,
}

impl Ah {
    /// Where an address handle leads. EINVAL if there is none.
    ///
    /// # Safety
    /// `ah` must be null or one of this provider.
    pub unsafe fn path(ah: *mut ibv_ah) -> Result<Path, VerbsError> {
        // SAFETY: as the caller says; the public part comes first.
        unsafe { ah.cast::<Ah>().as_ref() }
            .map(|ah| ah.path)
            .ok_or(VerbsError::Invalid)
    }
}

/// Resolves an address vector. On RoCE it must be global.
pub(super) fn resolve(context: &Context, attr: &ibv_ah_attr) -> Result<Path, VerbsError> {
    if attr.is_global == 0 || u32::from(attr.port_num) != PORT {
        return Err(VerbsError::Invalid);
    }
    let grh = &attr.grh;
    context.engine.resolve(
        grh.sgid_index,
        grh.dgid,
        grh.traffic_class,
        grh.hop_limit,
        grh.flow_label,
        attr.sl,
    )
}

/// The address vector of a QP that has none.
pub(super) const NOWHERE: ibv_ah_attr = ibv_ah_attr {
    grh: ibv_global_route {
        dgid: [0; 16],
        flow_label: 0,
        sgid_index: 0,
        hop_limit: 0,
        traffic_class: 0,
        _align: [],
    },
    dlid: 0,
    sl: 0,
    src_path_bits: 0,
    static_rate: 0,
    is_global: 0,
    port_num: 0,
};

/// The address vector that leads to a path.
pub(super) fn attr_of(path: &Path) -> ibv_ah_attr {
    let dgid = match path.dest {
        std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(v6) => v6.octets(),
    };
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid,
            flow_label: path.flow_label,
            sgid_index: path.sgid_index,
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
            ..NOWHERE.grh
        },
        sl: path.service_level,
        is_global: 1,
        port_num: PORT as u8,
        ..NOWHERE
    }
}

pub(super) unsafe extern "C" fn create_ah(public: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    make(|| {
        // SAFETY: libibverbs passes a PD of this provider, and an address vector.
        let (pd, attr) = unsafe { (Pd::of(public), &*attr) };
        let path = resolve(&pd.context, attr)?;
        // SAFETY: a PD has its context.
        let context = unsafe { (*public).context };
        let ah = Ah {
            public: ibv_ah {
                context,
                pd: public,
                handle: next_handle(),
            },
            path,
            _domain: pd.enter(),
        };
        Ok(Box::into_raw(Box::new(ah)).cast())
    })
}

pub(super) unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    verb(|| {
        // SAFETY: `create_ah` made it, and the program destroys it once.
        drop(unsafe { Box::from_raw(ah.cast::<Ah>()) });
        Ok(())
    })
}
