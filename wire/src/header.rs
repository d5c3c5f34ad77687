//! What all fixed-length headers share: the checked cut of their bytes, and `emit`.

use crate::ParseError;

/// The first `N` bytes of `bytes`, or an error naming what lacks them.
#[inline]
pub(crate) fn take<'a, const N: usize>(
    what: &'static str,
    bytes: &'a [u8],
) -> Result<&'a [u8; N], ParseError> {
    bytes.first_chunk().ok_or(ParseError::Truncated {
        what,
        need: N,
        have: bytes.len(),
    })
}

/// The `N` bytes at `AT` of an array that is known to hold them: checked when compiled.
#[inline]
pub(crate) const fn at<const AT: usize, const N: usize, const M: usize>(bytes: &[u8; M]) -> [u8; N] {
    const { assert!(AT + N <= M) };
    let mut out = [0; N];
    let mut i = 0;
    while i < N {
        out[i] = bytes[AT + i];
        i += 1;
    }
    out
}

/// The 24-bit number at `AT`.
#[inline]
pub(crate) const fn u24<const AT: usize, const M: usize>(bytes: &[u8; M]) -> u32 {
    let [a, b, c] = at::<AT, 3, M>(bytes);
    u32::from_be_bytes([0, a, b, c])
}

/// Writes `value` at `AT` of an array that has room for it: checked when compiled.
#[inline]
pub(crate) const fn put<const AT: usize, const N: usize, const M: usize>(
    bytes: &mut [u8; M],
    value: [u8; N],
) {
    const { assert!(AT + N <= M) };
    let mut i = 0;
    while i < N {
        bytes[AT + i] = value[i];
        i += 1;
    }
}

/// Writes the low 24 bits of `value` at `AT`.
#[inline]
pub(crate) const fn put24<const AT: usize, const M: usize>(bytes: &mut [u8; M], value: u32) {
    let [_, a, b, c] = value.to_be_bytes();
    put::<AT, 3, M>(bytes, [a, b, c]);
}

/// Implements `emit` for a header with `LEN` and `to_bytes`.
macro_rules! emit {
    ($header:ident) => {
        impl $header {
            /// Writes the header to the start of `out`.
            ///
            /// # Panics
            /// If `out` is shorter than `LEN`.
            #[inline]
            pub fn emit(&self, out: &mut [u8]) {
                out[..Self::LEN].copy_from_slice(&self.to_bytes());
            }
        }
    };
}
pub(crate) use emit;
