//! Why CM messages refuse: the reasons of REJ and the statuses of SIDR_REP (reference section
//! 13; IBTA tables 108 and 119).

macro_rules! codes {
    ($(#[$doc:meta])* $type:ident($int:ident) { $($name:ident = $value:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        pub struct $type(pub $int);

        impl $type {
            $(
                #[doc = concat!(stringify!($value), ": ", $text, ".")]
                pub const $name: Self = Self($value);
            )*

            /// The code in words, if it is a known one.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    /// Why a REJ refuses; any other number may come.
    RejReason(u16) {
        NO_QP = 1, "no queue pair";
        NO_EEC = 2, "no end-to-end context";
        NO_RESOURCES = 3, "no resources";
        TIMEOUT = 4, "timeout";
        UNSUPPORTED = 5, "unsupported request";
        INVALID_COMM_ID = 6, "invalid communication id";
        INVALID_COMM_INSTANCE = 7, "invalid communication instance";
        INVALID_SERVICE_ID = 8, "invalid service id";
        INVALID_TRANSPORT_TYPE = 9, "invalid transport service type";
        STALE_CONNECTION = 10, "stale connection";
        RDC_NOT_EXIST = 11, "RD channel does not exist";
        INVALID_GID = 12, "primary GID rejected";
        INVALID_LID = 13, "primary LID rejected";
        INVALID_SL = 14, "invalid primary service level";
        INVALID_TRAFFIC_CLASS = 15, "invalid primary traffic class";
        INVALID_HOP_LIMIT = 16, "invalid primary hop limit";
        INVALID_PACKET_RATE = 17, "primary packet rate rejected";
        INVALID_ALT_GID = 18, "alternate GID rejected";
        INVALID_ALT_LID = 19, "alternate LID rejected";
        INVALID_ALT_SL = 20, "invalid alternate service level";
        INVALID_ALT_TRAFFIC_CLASS = 21, "invalid alternate traffic class";
        INVALID_ALT_HOP_LIMIT = 22, "invalid alternate hop limit";
        INVALID_ALT_PACKET_RATE = 23, "alternate packet rate rejected";
        PORT_CM_REDIRECT = 24, "port and CM redirection";
        PORT_REDIRECT = 25, "port redirection";
        INVALID_MTU = 26, "invalid path MTU";
        INSUFFICIENT_RESPONDER_RESOURCES = 27, "insufficient responder resources";
        CONSUMER_DEFINED = 28, "rejected by the consumer";
        INVALID_RNR_RETRY = 29, "RNR retry count rejected";
        DUPLICATE_LOCAL_COMM_ID = 30, "duplicate local communication id";
        INVALID_CLASS_VERSION = 31, "invalid class version";
        INVALID_FLOW_LABEL = 32, "invalid primary flow label";
        INVALID_ALT_FLOW_LABEL = 33, "invalid alternate flow label";
        VENDOR_OPTION_NOT_SUPPORTED = 35, "vendor option not supported";
    }
}

codes! {
    /// The status of a SIDR_REP; any other number may come.
    SidrStatus(u8) {
        SUCCESS = 0, "success";
        UNSUPPORTED = 1, "service id not supported";
        REJECTED = 2, "rejected by the service";
        NO_QP = 3, "no queue pair";
        REDIRECT = 4, "redirected";
        UNSUPPORTED_VERSION = 5, "version not supported";
    }
}
