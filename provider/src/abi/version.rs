//! What differs between rdma-core releases in the private interface between libibverbs and its providers.
//!
//! The interface has no stable number: rdma-core 62 changed it under the number of 59. So it is keyed by release.

/// Newest release that the tables below describe.
pub const NEWEST: u32 = 65;
/// Oldest release that the tables below describe.
pub const OLDEST: u32 = 39;

/// The private interface of one rdma-core release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abi {
    /// The release, as in `libibverbs.so.1.14.44.0`: 44.
    pub release: u32,
    /// The number in `verbs_register_driver_NN` and in the suffix of provider files, `-rdmavNN.so`.
    pub private: u32,
    /// The newest version of public symbols: 14 for `IBVERBS_1.14`.
    pub public: u32,
    /// Size of `struct verbs_context`, in bytes; `struct ibv_context` is its last [`Abi::IBV_CONTEXT`] bytes.
    pub verbs_context: usize,
    /// Size of `struct ibv_qp_ex`, in bytes, and so the offset of `comp_mask` in `struct verbs_qp`.
    pub qp_ex: usize,
    /// Size of `struct ibv_port_attr`, in bytes.
    pub port_attr: usize,
}

/// What a libibverbs shows of its release when its file name does not tell it.
#[derive(Clone, Copy, Debug)]
pub struct Traits {
    /// The number of its private interface.
    pub private: u32,
    /// The newest version of its public symbols.
    pub public: u32,
    /// Size of its `struct ibv_qp_ex`, in bytes.
    pub qp_ex: usize,
}

impl Abi {
    /// Sizes that `struct ibv_qp_ex` has had, in bytes.
    pub const QP_EX: [usize; 3] = [344, 352, 360];

    /// Size of `struct ibv_context`, in bytes; the same in every release.
    pub const IBV_CONTEXT: usize = 328;

    /// The interface of an rdma-core release, if it is known.
    pub fn of_release(release: u32) -> Option<Abi> {
        let (private, public, verbs_context) = match release {
            39..=56 => (34, 14, 648),
            57..=58 => (57, 14, 648),
            59..=61 => (59, 15, 672),
            62..=63 => (59, 16, 680),
            64 => (64, 17, 696),
            65 => (65, 18, 696),
            _ => return None,
        };
        Some(Abi {
            release,
            private,
            public,
            verbs_context,
            qp_ex: match release {
                ..=43 => 344,
                44 => 352,
                _ => 360,
            },
            port_attr: if release < 49 { 52 } else { 56 },
        })
    }

    /// The interface of a library with these traits, if all known releases that have them agree in it.
    ///
    /// They need not agree in `ibv_port_attr`: the shorter one suits all, as libibverbs has set the rest to zero.
    pub fn with_traits(traits: Traits) -> Option<Abi> {
        let mut fitting = (OLDEST..=NEWEST).filter_map(Abi::of_release).filter(|abi| {
            (abi.private, abi.public, abi.qp_ex) == (traits.private, traits.public, traits.qp_ex)
        });
        let first = fitting.next()?;
        fitting
            .all(|abi| abi.verbs_context == first.verbs_context && abi.ops().eq(first.ops()))
            .then_some(first)
    }

    /// Names of the members of `struct verbs_context_ops`, in order.
    pub fn ops(&self) -> impl Iterator<Item = &'static str> {
        let release = self.release;
        OPS.iter()
            .filter(move |(_, since)| *since <= release)
            .map(|(name, _)| *name)
    }

    /// Offset of `struct ibv_context` in `struct verbs_context`, in bytes.
    pub fn ibv_context(&self) -> usize {
        self.verbs_context - Self::IBV_CONTEXT
    }

    /// Offset of `sz` in `struct verbs_context`, in bytes: there libibverbs states the size of the structure.
    pub fn sz(&self) -> usize {
        self.ibv_context() - size_of::<usize>()
    }
}

/// Every op of `struct verbs_context_ops`, in the order of the structure (by name), with the release that added it.
const OPS: &[(&str, u32)] = &[
    ("advise_mr", 39),
    ("alloc_buf", 64),
    ("alloc_dm", 39),
    ("alloc_dmah", 59),
    ("alloc_mw", 39),
    ("alloc_null_mr", 39),
    ("alloc_parent_domain", 39),
    ("alloc_pd", 39),
    ("alloc_td", 39),
    ("async_event", 39),
    ("attach_counters_point_flow", 39),
    ("attach_mcast", 39),
    ("bind_mw", 39),
    ("close_xrcd", 39),
    ("cq_event", 39),
    ("create_ah", 39),
    ("create_comp_cntr", 65),
    ("create_counters", 39),
    ("create_cq", 39),
    ("create_cq_ex", 39),
    ("create_flow", 39),
    ("create_flow_action_esp", 39),
    ("create_qp", 39),
    ("create_qp_ex", 39),
    ("create_rwq_ind_table", 39),
    ("create_srq", 39),
    ("create_srq_ex", 39),
    ("create_wq", 39),
    ("dealloc_dmah", 59),
    ("dealloc_mw", 39),
    ("dealloc_pd", 39),
    ("dealloc_td", 39),
    ("dereg_mr", 39),
    ("destroy_ah", 39),
    ("destroy_comp_cntr", 65),
    ("destroy_counters", 39),
    ("destroy_cq", 39),
    ("destroy_flow", 39),
    ("destroy_flow_action", 39),
    ("destroy_qp", 39),
    ("destroy_rwq_ind_table", 39),
    ("destroy_srq", 39),
    ("destroy_wq", 39),
    ("detach_mcast", 39),
    ("dm_export_dmabuf_fd", 62),
    ("free_buf", 64),
    ("free_context", 39),
    ("free_dm", 39),
    ("get_srq_num", 39),
    ("import_dm", 39),
    ("import_mr", 39),
    ("import_pd", 39),
    ("inc_comp_cntr", 65),
    ("inc_err_comp_cntr", 65),
    ("modify_cq", 39),
    ("modify_flow_action_esp", 39),
    ("modify_qp", 39),
    ("modify_qp_rate_limit", 39),
    ("modify_srq", 39),
    ("modify_wq", 39),
    ("open_qp", 39),
    ("open_xrcd", 39),
    ("poll_cq", 39),
    ("post_recv", 39),
    ("post_send", 39),
    ("post_srq_ops", 39),
    ("post_srq_recv", 39),
    ("qp_attach_comp_cntr", 65),
    ("query_comp_cntr_caps", 65),
    ("query_device_ex", 39),
    ("query_ece", 39),
    ("query_port", 39),
    ("query_port_speed", 62),
    ("query_qp", 39),
    ("query_qp_data_in_order", 39),
    ("query_rt_values", 39),
    ("query_srq", 39),
    ("read_comp_cntr", 65),
    ("read_counters", 39),
    ("read_err_comp_cntr", 65),
    ("reg_dm_mr", 39),
    ("reg_dmabuf_mr", 39),
    ("reg_mr", 39),
    ("reg_mr_ex", 59),
    ("req_notify_cq", 39),
    ("rereg_mr", 39),
    ("resize_cq", 39),
    ("set_comp_cntr", 65),
    ("set_ece", 39),
    ("set_err_comp_cntr", 65),
    ("unimport_dm", 39),
    ("unimport_mr", 39),
    ("unimport_pd", 39),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_ops_per_release() {
        for (releases, count) in [
            (39..=58, 76),
            (59..=61, 79),
            (62..=63, 81),
            (64..=64, 83),
            (65..=65, 93),
        ] {
            for release in releases {
                let abi = Abi::of_release(release).unwrap();
                assert_eq!(abi.ops().count(), count, "release {release}");
            }
        }
    }

    #[test]
    fn an_op_is_followed_by_its_neighbour_of_that_release() {
        let after = |release, op| {
            let abi = Abi::of_release(release).unwrap();
            abi.ops().skip_while(|o| *o != op).nth(1)
        };
        assert_eq!(after(44, "alloc_dm"), Some("alloc_mw"));
        assert_eq!(after(59, "alloc_dm"), Some("alloc_dmah"));
        assert_eq!(after(63, "advise_mr"), Some("alloc_dm"));
        assert_eq!(after(64, "advise_mr"), Some("alloc_buf"));
        assert_eq!(after(64, "post_srq_recv"), Some("query_device_ex"));
        assert_eq!(after(65, "post_srq_recv"), Some("qp_attach_comp_cntr"));
    }

    #[test]
    fn unknown_releases_have_no_interface() {
        assert_eq!(Abi::of_release(OLDEST - 1), None);
        assert_eq!(Abi::of_release(NEWEST + 1), None);
        assert!((OLDEST..=NEWEST).all(|release| Abi::of_release(release).is_some()));
    }

    #[test]
    fn traits_tell_every_release_or_one_like_it() {
        for release in OLDEST..=NEWEST {
            let abi = Abi::of_release(release).unwrap();
            let found = Abi::with_traits(Traits {
                private: abi.private,
                public: abi.public,
                qp_ex: abi.qp_ex,
            })
            .unwrap();
            assert!(Abi::QP_EX.contains(&abi.qp_ex));
            assert_eq!(found.verbs_context, abi.verbs_context, "release {release}");
            assert!(found.ops().eq(abi.ops()), "release {release}");
            assert!(found.port_attr <= abi.port_attr, "release {release}");
        }
        let unknown = |private, public, qp_ex| {
            Abi::with_traits(Traits {
                private,
                public,
                qp_ex,
            })
        };
        assert_eq!(unknown(66, 19, 360), None);
        assert_eq!(
            unknown(65, 19, 360),
            None,
            "a later release with the same private interface"
        );
        assert_eq!(unknown(65, 18, 352), None);
    }

    #[test]
    fn the_context_ends_the_structure() {
        let offset = |release| Abi::of_release(release).unwrap().ibv_context();
        assert_eq!(
            (39..=65)
                .map(offset)
                .collect::<std::collections::BTreeSet<_>>()
                .len(),
            4
        );
        assert_eq!(
            [offset(44), offset(60), offset(63), offset(65)],
            [320, 344, 352, 368]
        );
    }
}
