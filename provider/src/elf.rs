//! Objects loaded in this process, and their global offset tables.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Relocation type of a function called through the PLT.
#[cfg(target_arch = "x86_64")]
const JUMP_SLOT: u64 = 7;
/// Relocation type of a function whose address is taken.
#[cfg(target_arch = "x86_64")]
const GLOB_DAT: u64 = 6;
/// Relocation type of a function called through the PLT.
#[cfg(target_arch = "aarch64")]
const JUMP_SLOT: u64 = 1026;
/// Relocation type of a function whose address is taken.
#[cfg(target_arch = "aarch64")]
const GLOB_DAT: u64 = 1025;

const PT_DYNAMIC: u32 = 2;
const PT_GNU_RELRO: u32 = 0x6474_e552;
const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;
const DT_VERDEF: i64 = 0x6fff_fffc;
const DT_VERDEFNUM: i64 = 0x6fff_fffd;

/// An entry of the dynamic section.
#[repr(C)]
struct Dyn {
    tag: i64,
    value: u64,
}

/// A relocation with addend.
#[repr(C)]
struct Rela {
    offset: u64,
    info: u64,
    addend: i64,
}

/// A symbol version that the object defines (`Elf64_Verdef`); its first auxiliary entry has the name.
#[repr(C)]
struct VersionDefinition {
    revision: u16,
    flags: u16,
    index: u16,
    names: u16,
    hash: u32,
    /// Where the auxiliary entry is, in bytes from this entry.
    name: u32,
    /// Where the next definition is, in bytes from this entry.
    next: u32,
}

/// A shared object (or the program) as the dynamic linker has loaded it.
#[derive(Clone, Debug)]
pub struct Object {
    /// Its file, as it was asked for (often a symbolic link); empty for the program.
    pub path: PathBuf,
    base: usize,
    dynamic: usize,
    relro: Option<Range<usize>>,
}

/// Lists the loaded objects.
pub fn loaded() -> Vec<Object> {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, objects: *mut c_void) -> c_int {
        // SAFETY: the dynamic linker passes a valid `info`, and `objects` is the vector of `loaded`.
        let (info, objects) = unsafe { (&*info, &mut *objects.cast::<Vec<Object>>()) };
        // SAFETY: `dlpi_phdr` points to `dlpi_phnum` program headers.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let base = info.dlpi_addr as usize;
        let find = |kind| headers.iter().find(|header| header.p_type == kind);
        if let Some(dynamic) = find(PT_DYNAMIC) {
            let path = if info.dlpi_name.is_null() {
                PathBuf::new()
            } else {
                // SAFETY: a name that is not null is NUL terminated.
                OsStr::from_bytes(unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes()).into()
            };
            objects.push(Object {
                path,
                base,
                dynamic: base + dynamic.p_vaddr as usize,
                relro: find(PT_GNU_RELRO).map(|header| {
                    let start = base + header.p_vaddr as usize;
                    start..start + header.p_memsz as usize
                }),
            });
        }
        0
    }
    let mut objects = Vec::new();
    // SAFETY: `visit` takes `objects` as what it is.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut objects).cast()) };
    objects
}

impl Object {
    /// Where it is loaded, which no other loaded object shares.
    pub fn base(&self) -> usize {
        self.base
    }

    /// The dynamic section: tags with their values.
    fn dynamic(&self) -> impl Iterator<Item = (i64, u64)> {
        let mut entry = self.dynamic as *const Dyn;
        std::iter::from_fn(move || {
            // SAFETY: the dynamic section is mapped and ends with DT_NULL, which is not passed.
            let Dyn { tag, value } = unsafe { entry.read() };
            if tag == 0 {
                return None;
            }
            // SAFETY: as above.
            entry = unsafe { entry.add(1) };
            Some((tag, value))
        })
    }

    /// Names of the symbol versions that it defines; the first is its own name.
    pub fn versions(&self) -> Vec<String> {
        let (mut strings, mut definition, mut count) = (0, 0, 0);
        for (tag, value) in self.dynamic() {
            match tag {
                DT_STRTAB => strings = self.absolute(value),
                DT_VERDEF => definition = self.absolute(value),
                DT_VERDEFNUM => count = value as usize,
                _ => {}
            }
        }
        let mut names = Vec::new();
        while names.len() < count && definition != 0 {
            // SAFETY: the dynamic section says that there are so many definitions, each followed by its names, and
            // names are NUL terminated strings of the table.
            unsafe {
                let VersionDefinition { name, next, .. } = (definition as *const VersionDefinition).read();
                let offset = ((definition + name as usize) as *const u32).read();
                let name = CStr::from_ptr((strings as *const c_char).add(offset as usize));
                names.push(name.to_string_lossy().into_owned());
                definition += next as usize;
            }
        }
        names
    }

    /// Makes the object's own calls of `symbol` go to `function`; gives the number of table entries changed.
    ///
    /// # Safety
    /// `function` must be callable as what the object takes `symbol` for, and stay loaded.
    pub unsafe fn redirect(&self, symbol: &CStr, function: *const c_void) -> io::Result<usize> {
        let slots = self.slots(symbol);
        for slot in &slots {
            // SAFETY: this is a slot of the symbol; the caller vouches for the function.
            unsafe { self.set(*slot, function)? };
        }
        Ok(slots.len())
    }

    /// Where the object's own calls of `symbol` go now; before the first call, that may be the object itself.
    pub fn target(&self, symbol: &CStr) -> Option<*const c_void> {
        let slot = *self.slots(symbol).first()?;
        // SAFETY: a slot of this object's table, which is always readable.
        let target = unsafe { &*(slot as *const std::sync::atomic::AtomicPtr<c_void>) };
        Some(target.load(std::sync::atomic::Ordering::Acquire).cast_const())
    }

    /// The entries of its global offset table by which it reaches `symbol`.
    fn slots(&self, symbol: &CStr) -> Vec<usize> {
        let (mut symbols, mut strings) = (0, 0);
        let (mut plt, mut plt_size, mut rela, mut rela_size) = (0, 0, 0, 0);
        for (tag, value) in self.dynamic() {
            match tag {
                DT_SYMTAB => symbols = self.absolute(value),
                DT_STRTAB => strings = self.absolute(value),
                DT_JMPREL => plt = self.absolute(value),
                DT_PLTRELSZ => plt_size = value as usize,
                DT_RELA => rela = self.absolute(value),
                DT_RELASZ => rela_size = value as usize,
                _ => {}
            }
        }
        let mut slots = Vec::new();
        for (table, size) in [(plt, plt_size), (rela, rela_size)] {
            if table == 0 {
                continue;
            }
            let count = size / size_of::<Rela>();
            // SAFETY: the dynamic section says where the table is and how long.
            for relocation in unsafe { std::slice::from_raw_parts(table as *const Rela, count) } {
                let kind = relocation.info & 0xffff_ffff;
                if kind != JUMP_SLOT && kind != GLOB_DAT {
                    continue;
                }
                let index = (relocation.info >> 32) as usize;
                // SAFETY: relocations name symbols of the table.
                let name = unsafe { (*(symbols as *const libc::Elf64_Sym).add(index)).st_name };
                // SAFETY: symbols have NUL terminated names in the string table.
                let name = unsafe { CStr::from_ptr((strings as *const c_char).add(name as usize)) };
                if name == symbol {
                    slots.push(self.base + relocation.offset as usize);
                }
            }
        }
        slots
    }

    /// Addresses in the dynamic section are relocated by glibc, and not by every other linker.
    fn absolute(&self, value: u64) -> usize {
        let value = value as usize;
        if value < self.base {
            self.base + value
        } else {
            value
        }
    }

    /// Stores into a slot, which may lie in pages that were made read-only after relocation.
    ///
    /// # Safety
    /// `slot` must be a slot of this object's table, and `function` fit it.
    unsafe fn set(&self, slot: usize, function: *const c_void) -> io::Result<()> {
        // SAFETY: sysconf has no preconditions.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let start = slot & !(page - 1);
        let protect = |protection| {
            // SAFETY: the page is the object's own data, and stays at least readable.
            match unsafe { libc::mprotect(start as *mut c_void, page, protection) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        protect(libc::PROT_READ | libc::PROT_WRITE)?;
        // SAFETY: the page is writable now. Other threads may call through the slot, so it changes at once.
        unsafe { &*(slot as *const std::sync::atomic::AtomicPtr<c_void>) }
            .store(function.cast_mut(), std::sync::atomic::Ordering::Release);
        if self.relro.as_ref().is_some_and(|relro| relro.contains(&slot)) {
            protect(libc::PROT_READ)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_the_c_library_and_the_program() {
        let objects = loaded();
        assert!(objects.iter().any(|object| object.path.as_os_str().is_empty()));
        assert!(
            objects
                .iter()
                .any(|object| object.path.to_string_lossy().contains("libc.so"))
        );
    }

    #[test]
    fn versions_of_the_c_library() {
        let objects = loaded();
        let libc = objects.iter().find(|it| it.path.ends_with("libc.so.6")).unwrap();
        let versions = libc.versions();
        assert_eq!(versions[0], "libc.so.6");
        assert!(versions.iter().any(|it| it == "GLIBC_2.17"), "{versions:?}");
        let program = objects.iter().find(|it| it.path.as_os_str().is_empty()).unwrap();
        assert!(program.versions().is_empty());
    }

    #[test]
    fn redirects_a_call_of_the_program_itself() {
        extern "C" fn other() -> libc::pid_t {
            -7
        }
        let objects = loaded();
        let program = objects
            .iter()
            .find(|object| object.path.as_os_str().is_empty())
            .unwrap();
        // SAFETY: `other` has the type of `getppid`.
        let changed = unsafe { program.redirect(c"getppid", other as *const c_void) }.unwrap();
        assert!(changed > 0);
        // SAFETY: getppid has no preconditions.
        assert_eq!(unsafe { libc::getppid() }, -7);
        assert_eq!(program.target(c"getppid"), Some(other as *const c_void));
    }

    #[test]
    fn an_unknown_symbol_changes_nothing() {
        let objects = loaded();
        // SAFETY: nothing is changed.
        let changed = unsafe { objects[0].redirect(c"no_such_function", std::ptr::null()) }.unwrap();
        assert_eq!(changed, 0);
    }
}
