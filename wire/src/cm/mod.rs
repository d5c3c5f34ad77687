//! Messages of the connection manager, one file each (reference section 13; IBTA 12, tables
//! 106 to 120 and annex A11).
//!
//! Every message is a MAD: a header of 24 bytes, then 232 that the message's structure covers.
//! All bit patterns of a message have a value; reserved bits are ignored, and sent as 0.

pub mod apr;
pub mod drep;
pub mod dreq;
pub mod ip_header;
pub mod lap;
pub mod mra;
pub mod path;
pub mod reason;
pub mod rej;
pub mod rep;
pub mod req;
pub mod rtu;
pub mod sidr_rep;
pub mod sidr_req;

pub use apr::Apr;
pub use drep::Drep;
pub use dreq::Dreq;
pub use ip_header::{IpHeader, IpPair, PortSpace};
pub use lap::Lap;
pub use mra::Mra;
pub use path::Path;
pub use reason::{RejReason, SidrStatus};
pub use rej::Rej;
pub use rep::Rep;
pub use req::Req;
pub use rtu::Rtu;
pub use sidr_rep::SidrRep;
pub use sidr_req::SidrReq;

use crate::ParseError;
use crate::header::take;
use crate::mad::{MAD_LEN, MadHeader};

/// Bytes of every message after the MAD header.
pub const CM_DATA_LEN: usize = MAD_LEN - MadHeader::LEN;

/// The management class of the connection manager.
pub const CM_CLASS: u8 = 0x07;
/// The version of that class.
pub const CM_CLASS_VERSION: u8 = 2;
/// The only method of that class, Send.
pub const CM_METHOD: u8 = 0x03;

/// The transport service of a connection, two bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ServiceType {
    /// 0: reliable connection.
    #[default]
    Rc,
    /// 1: unreliable connection.
    Uc,
    /// 2: reliable datagram.
    Rd,
    /// 3: see the extended transport field.
    Extended,
}

impl ServiceType {
    /// The service of the low two bits.
    pub const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::Rc,
            1 => Self::Uc,
            2 => Self::Rd,
            _ => Self::Extended,
        }
    }
}

/// The message that a REJ refuses or an MRA acknowledges, two bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Answered {
    /// 0: a REQ.
    #[default]
    Req,
    /// 1: a REP.
    Rep,
    /// 2: in a REJ another message or none, in an MRA a LAP.
    Other,
    /// 3: reserved.
    Reserved,
}

impl Answered {
    /// The message of the low two bits.
    pub const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::Req,
            1 => Self::Rep,
            2 => Self::Other,
            _ => Self::Reserved,
        }
    }
}

/// What all messages share; needs `from_bytes` and `to_bytes`.
macro_rules! message {
    ($message:ident, $attribute_id:literal, $name:literal) => {
        impl $message {
            /// The attribute id that names this message in the MAD header.
            pub const ATTRIBUTE_ID: u16 = $attribute_id;

            /// Bytes of the message, without the MAD header.
            pub const LEN: usize = CM_DATA_LEN;

            /// Reads the message from what follows the MAD header.
            pub fn parse(data: &[u8]) -> Result<Self, crate::ParseError> {
                crate::header::take($name, data).map(Self::from_bytes)
            }
        }

        crate::header::emit!($message);

        impl Default for $message {
            /// The message of zeros.
            fn default() -> Self {
                Self::from_bytes(&[0; CM_DATA_LEN])
            }
        }
    };
}
use message;

macro_rules! messages {
    ($($message:ident $name:literal),*) => {
        /// Any message of the connection manager.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[allow(missing_docs, clippy::large_enum_variant)] // the types have the words; all are large
        pub enum CmMessage {
            $($message($message),)*
        }

        impl CmMessage {
            /// The message of such an attribute id; `data` is what follows the MAD header.
            pub fn parse(attribute_id: u16, data: &[u8]) -> Result<Self, ParseError> {
                match attribute_id {
                    $($message::ATTRIBUTE_ID => $message::parse(data).map(Self::$message),)*
                    other => {
                        Err(ParseError::Field { what: "CM attribute id", value: other.into() })
                    }
                }
            }

            /// The attribute id that names this message in the MAD header.
            pub const fn attribute_id(&self) -> u16 {
                match self { $(Self::$message(_) => $message::ATTRIBUTE_ID,)* }
            }

            /// The message's name: "REQ".
            pub const fn name(&self) -> &'static str {
                match self { $(Self::$message(_) => $name,)* }
            }

            /// The bytes after the MAD header.
            pub const fn to_bytes(&self) -> [u8; CM_DATA_LEN] {
                match self { $(Self::$message(message) => message.to_bytes(),)* }
            }
        }

        $(
            impl From<$message> for CmMessage {
                fn from(message: $message) -> Self {
                    Self::$message(message)
                }
            }
        )*
    };
}

messages! {
    Req "REQ", Mra "MRA", Rej "REJ", Rep "REP", Rtu "RTU", Dreq "DREQ", Drep "DREP",
    SidrReq "SIDR_REQ", SidrRep "SIDR_REP", Lap "LAP", Apr "APR"
}

/// A whole MAD of the connection manager: what a UD SEND_ONLY to QP 1 carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CmMad {
    /// Transaction id, the sender's choice; an answer repeats it.
    pub tid: u64,
    /// Attribute modifier: 0, or the enhanced connection option's word.
    pub attribute_modifier: u32,
    /// The message.
    pub message: CmMessage,
}

impl CmMad {
    /// Bytes of the MAD.
    pub const LEN: usize = MAD_LEN;

    /// Reads a MAD. Versions, class and method must be those of the connection manager; the
    /// status and the reserved bytes are ignored.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let mad: &[u8; MAD_LEN] = take("MAD", bytes)?;
        let (header, data) = mad.split_at(MadHeader::LEN);
        let header = MadHeader::parse(header)?;
        let check = |what, value: u8, expected| {
            if value == expected {
                Ok(())
            } else {
                Err(ParseError::Field {
                    what,
                    value: value.into(),
                })
            }
        };
        check("MAD base version", header.base_version, 1)?;
        check("MAD class, which is not CM,", header.class, CM_CLASS)?;
        check("CM class version", header.class_version, CM_CLASS_VERSION)?;
        check("CM method", header.method, CM_METHOD)?;
        Ok(Self {
            tid: header.tid,
            attribute_modifier: header.attribute_modifier,
            message: CmMessage::parse(header.attribute_id, data)?,
        })
    }

    /// The MAD header, with status 0.
    pub const fn header(&self) -> MadHeader {
        MadHeader {
            base_version: 1,
            class: CM_CLASS,
            class_version: CM_CLASS_VERSION,
            method: CM_METHOD,
            status: 0,
            class_specific: 0,
            tid: self.tid,
            attribute_id: self.message.attribute_id(),
            attribute_modifier: self.attribute_modifier,
        }
    }

    /// The bytes of the MAD.
    pub fn to_bytes(&self) -> [u8; MAD_LEN] {
        let mut b = [0; MAD_LEN];
        self.header().emit(&mut b);
        b[MadHeader::LEN..].copy_from_slice(&self.message.to_bytes());
        b
    }
}

crate::header::emit!(CmMad);
