//! Payload between packets and the memory that scatter/gather lists name.

use crate::memory::keys::{KeyTable, Spot};
use crate::memory::{Fault, Memory};
use crate::verbs::{Access, Sge};

use crate::device::PdId;

/// Memory as seen from a protection domain.
#[derive(Clone, Copy)]
pub(crate) struct Domain<'a> {
    pub pd: PdId,
    pub keys: &'a KeyTable,
    pub memory: &'a dyn Memory,
}

/// A place in a scatter/gather list.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cursor {
    index: usize,
    offset: u32,
}

impl Cursor {
    /// The place `offset` bytes into the list; a fault if the list is shorter.
    pub fn at(sges: &[Sge], offset: u32) -> Result<Cursor, Fault> {
        let mut offset = offset;
        for (index, sge) in sges.iter().enumerate() {
            if offset < sge.length {
                return Ok(Cursor { index, offset });
            }
            offset -= sge.length;
        }
        if offset == 0 {
            Ok(Cursor {
                index: sges.len(),
                offset: 0,
            })
        } else {
            Err(Fault { addr: 0 })
        }
    }
}

impl Domain<'_> {
    /// Fills `out` with the list's bytes from `skip` on. A list too short, or a key that does not allow it, is a
    /// fault like memory that is not there.
    #[inline]
    pub fn gather(&self, sges: &[Sge], skip: u32, out: &mut [u8]) -> Result<(), Fault> {
        let (mut skip, mut out) = (skip, out);
        for sge in sges {
            if out.is_empty() {
                return Ok(());
            }
            if skip >= sge.length {
                skip -= sge.length;
                continue;
            }
            let len = ((sge.length - skip) as usize).min(out.len());
            let (part, rest) = out.split_at_mut(len);
            match self.local(sge, skip, len, Access::empty())? {
                Spot::At(addr) => self.memory.read(addr, part)?,
                Spot::Nowhere => part.fill(0),
            }
            (skip, out) = (0, rest);
        }
        if out.is_empty() {
            Ok(())
        } else {
            Err(Fault { addr: 0 })
        }
    }

    /// Copies `data` to the list's memory at the cursor, and moves it on. The caller has made sure that it fits.
    #[inline]
    pub fn scatter(&self, sges: &[Sge], cursor: &mut Cursor, data: &[u8]) -> Result<(), Fault> {
        let mut data = data;
        while !data.is_empty() {
            let sge = sges.get(cursor.index).ok_or(Fault { addr: 0 })?;
            let room = sge.length.saturating_sub(cursor.offset) as usize;
            if room == 0 {
                *cursor = Cursor {
                    index: cursor.index + 1,
                    offset: 0,
                };
                continue;
            }
            let (part, rest) = data.split_at(room.min(data.len()));
            if let Spot::At(addr) = self.local(sge, cursor.offset, part.len(), Access::LOCAL_WRITE)? {
                self.memory.write(addr, part)?;
            }
            cursor.offset += part.len() as u32;
            data = rest;
        }
        Ok(())
    }

    /// Where a part of an entry lies.
    fn local(&self, sge: &Sge, offset: u32, len: usize, rights: Access) -> Result<Spot, Fault> {
        let fault = Fault { addr: sge.addr };
        let va = sge.addr.checked_add(u64::from(offset)).ok_or(fault)?;
        self.keys
            .local(self.pd, sge.lkey, va, len as u64, rights)
            .map_err(|_| fault)
    }
}
