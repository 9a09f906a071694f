//! Compiled kernels on disk, so that only the first program on a machine waits for the compiler.
//!
//! A file's name is a hash of everything its content depends on: the source, the options, the
//! architecture of the card and the version of the compiler. So a file never goes out of date. A
//! damaged file is detected by the checksum at its end and written anew.
//!
//! The folder is `$FARWIRE_CUDA_CACHE`, or `$XDG_CACHE_HOME/farwire/cuda`, or
//! `~/.cache/farwire/cuda`. An empty `FARWIRE_CUDA_CACHE` turns the cache off. A folder that cannot
//! be written to costs a compilation each time, but is never an error.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A folder of compiled kernels, or none.
#[derive(Clone, Debug, Default)]
pub struct Cache(Option<PathBuf>);

impl Cache {
    /// The folder named by the environment.
    pub fn from_env() -> Self {
        Self::choose(|name| std::env::var_os(name))
    }

    fn choose(var: impl Fn(&str) -> Option<OsString>) -> Self {
        if let Some(given) = var("FARWIRE_CUDA_CACHE") {
            return Self((!given.is_empty()).then(|| given.into()));
        }
        let set = |name| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
        Self(base.map(|base| base.join("farwire").join("cuda")))
    }

    /// This folder.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self(Some(folder.into()))
    }

    fn path(&self, key: &Key) -> Option<PathBuf> {
        Some(self.0.as_ref()?.join(format!("{:032x}.cubin", key.0)))
    }

    /// The bytes stored under the key, if they are intact.
    pub fn load(&self, key: &Key) -> Option<Vec<u8>> {
        let mut bytes = fs::read(self.path(key)?).ok()?;
        let sum = bytes.split_off(bytes.len().checked_sub(16)?);
        (sum == hash(&[&bytes]).to_le_bytes()).then_some(bytes)
    }

    /// Stores bytes under the key. A program that looks meanwhile finds all of them or nothing.
    pub fn store(&self, key: &Key, bytes: &[u8]) {
        let Some(path) = self.path(key) else { return };
        // A cache that cannot be written is a cache that misses.
        let _ = write_whole(&path, bytes);
    }
}

fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let written = (|| {
        let mut file = fs::File::create(&part)?;
        file.write_all(bytes)?;
        file.write_all(&hash(&[bytes]).to_le_bytes())?;
        fs::rename(&part, path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written
}

/// A hash of everything a compiled kernel depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(u128);

impl Key {
    /// The key for these parts, in order.
    pub fn new(parts: &[&str]) -> Self {
        Self(hash(&parts.iter().map(|part| part.as_bytes()).collect::<Vec<_>>()))
    }
}

/// 128-bit FNV-1a over the parts, each preceded by its length.
fn hash(parts: &[&[u8]]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let step = |hash: u128, byte: &u8| (hash ^ u128::from(*byte)).wrapping_mul(PRIME);
    parts.iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, part| {
        let hash = (part.len() as u64).to_le_bytes().iter().fold(hash, step);
        part.iter().fold(hash, step)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("farwire-cuda-cache-{}-{name}", std::process::id()))
    }

    #[test]
    fn what_is_stored_is_loaded_and_what_is_damaged_is_not() {
        let folder = folder("damaged");
        let (cache, key) = (Cache::at(&folder), Key::new(&["source", "sm_90"]));
        assert_eq!(cache.load(&key), None);
        cache.store(&key, b"kernel");
        assert_eq!(cache.load(&key).as_deref(), Some(&b"kernel"[..]));
        let path = cache.path(&key).unwrap();
        let whole = fs::read(&path).unwrap();
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(cache.load(&key), None, "{len} bytes");
        }
        let mut other = whole.clone();
        other[2] ^= 1;
        fs::write(&path, &other).unwrap();
        assert_eq!(cache.load(&key), None);
        cache.store(&key, b"kernel");
        assert_eq!(fs::read(&path).unwrap(), whole);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no part is left behind");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn keys_tell_parts_apart() {
        assert_ne!(Key::new(&["ab", "c"]), Key::new(&["a", "bc"]));
        assert_ne!(Key::new(&["a"]), Key::new(&["a", ""]));
        assert_eq!(Key::new(&["a", "b"]), Key::new(&["a", "b"]));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_a_miss() {
        let file = folder("file");
        fs::write(&file, "not a folder").unwrap();
        let (cache, key) = (Cache::at(file.join("below")), Key::new(&["x"]));
        cache.store(&key, b"kernel");
        assert_eq!(cache.load(&key), None);
        fs::remove_file(file).unwrap();
    }

    #[test]
    fn the_environment_names_the_folder() {
        let choose = |pairs: &[(&str, &str)]| {
            let find = |name: &str| pairs.iter().find(|pair| pair.0 == name);
            Cache::choose(|name| find(name).map(|pair| pair.1.into())).0
        };
        assert_eq!(choose(&[("HOME", "/h")]), Some("/h/.cache/farwire/cuda".into()));
        let both = [("HOME", "/h"), ("XDG_CACHE_HOME", "/x")];
        assert_eq!(choose(&both), Some("/x/farwire/cuda".into()));
        assert_eq!(choose(&[("HOME", "/h"), ("XDG_CACHE_HOME", "")]), choose(&both[..1]));
        assert_eq!(choose(&[("FARWIRE_CUDA_CACHE", "/c"), both[0]]), Some("/c".into()));
        assert_eq!(choose(&[("FARWIRE_CUDA_CACHE", ""), both[0]]), None);
        assert_eq!(choose(&[]), None);
    }
}
