//! Counters of CM messages, and of drops by reason.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a [`super::Cm`] counts.
        #[derive(Default)]
        pub(super) struct Counters {
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
    /// Messages received, those that are dropped included.
    cm_rx,
    /// Messages sent, repetitions included.
    cm_tx,
    /// Messages sent again, as no answer came.
    cm_retries,
    /// Messages that nobody answered to the last try.
    cm_timeouts,
    /// Messages that came again.
    cm_duplicates,
    /// REQs and REPs from a queue pair that has a connection already.
    cm_stale,
    /// Not a MAD of the connection manager, or a field that makes no sense.
    cm_drop_malformed,
    /// Of a connection or an exchange that is not known.
    cm_drop_unknown,
    /// Not from the address that the connection is with, not to its own, or not from its device.
    cm_drop_peer,
    /// The connection's state takes no such message.
    cm_drop_state,
    /// DREQs that name another queue pair.
    cm_drop_qpn,
    /// REQs when too many wait for an answer.
    cm_drop_requests,
    /// SIDR_REQs when too many wait for an answer.
    cm_drop_sidr_requests,
    /// REQs refused as they name other addresses than they have come from and to, or a transport that is not known.
    cm_refused,
    /// Messages that came before what an earlier connection manager had, when too many waited for that.
    cm_drop_early,
    /// Ended connections and refusals that were forgotten early, as there were too many.
    cm_forgotten,
}
