//! Marks the provider as never to be unloaded: libibverbs keeps pointers into it, and the engine has a thread.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
