//! Counters of packets, drops by reason, and recoveries.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a device counts.
        #[derive(Default)]
        pub(crate) struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Every counter by its name.
            pub fn each(&self, out: &mut dyn FnMut(&'static str, u64)) {
                $(out(stringify!($name), self.$name);)*
            }
        }
    };
}

counters! {
    /// Packets taken from the link.
    transport_rx,
    /// Packets given to the link, retransmissions included.
    transport_tx,
    /// Shorter than their headers.
    drop_length,
    /// Unknown opcode, or one of another transport than the QP's.
    drop_opcode,
    /// Transport header version not 0.
    drop_version,
    /// No such QP.
    drop_qpn,
    /// To a multicast group that no QP is attached to, or to a single QP of it.
    drop_group,
    /// The QP's state takes no such packet.
    drop_state,
    /// P_Key of another partition.
    drop_pkey,
    /// Q_Key that is not the QP's.
    drop_qkey,
    /// Not from the address that the QP names, or not to its own.
    drop_source,
    /// ICRC wrong.
    drop_icrc,
    /// Responses outside the outstanding range, and requests behind a gap that was already NAKed.
    drop_psn,
    /// UC and UD messages without a receive.
    drop_no_receive,
    /// UC packets of a message whose beginning was lost, and malformed UC and UD packets.
    drop_sequence,
    /// UC WRITEs to memory that does not exist, or not for the peer.
    drop_access,
    /// Congestion notifications.
    rx_cnp,
    /// Requests that came again.
    duplicates,
    /// Packets sent again.
    retransmits,
    /// Local ACK timeouts.
    timeouts,
    /// NAKs of PSN sequence errors received.
    rx_nak_sequence,
    /// RNR NAKs received.
    rx_rnr_nak,
    /// NAKs of other kinds received.
    rx_nak_error,
    /// NAKs of PSN sequence errors sent.
    tx_nak_sequence,
    /// RNR NAKs sent.
    tx_rnr_nak,
    /// NAKs of other kinds sent.
    tx_nak_error,
}
