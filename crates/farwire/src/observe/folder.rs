//! Folders for flight records, safe from other users of the machine.
//!
//! Records go to a folder of this user's by default. Its name is known to all, so others may try to
//! put a folder or a link of theirs in its place. Therefore:
//!
//! 1. The folder itself is never reached through a link, belongs to this user, and nobody else may
//!    read or write in it. Otherwise it is not used.
//! 2. It is looked at once, when it is opened; files are then named relative to the open folder.
//! 3. A record is written to a new file, which must not exist, and then renamed. Links are
//!    replaced, never followed.
//! 4. Old records are removed: those of a week ago, and all but the 64 newest entries. (A job's
//!    folder is one entry.)
//!
//! In a folder that the user has named, only rule 3 holds: who may read and write there is for the
//! user to decide, and nothing is removed.

use std::ffi::{CStr, CString};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{Access, AtFlags, CWD, Dir, Mode, OFlags};
use rustix::io::Errno;

/// Entries of the user's folder that are kept.
const KEPT: usize = 64;
/// Seconds after which they are removed.
const MAX_AGE: u64 = 7 * 24 * 3600;

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// An open folder.
#[derive(Debug)]
pub(super) struct Folder {
    file: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// This user's own: `farwire` in `XDG_RUNTIME_DIR`, if that is this user's, else `farwire-` and
    /// the user's number among the system's temporary files. Made if need be, and tidied.
    pub(super) fn of_user() -> io::Result<Self> {
        let user = rustix::process::geteuid().as_raw();
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let runtime = runtime.filter(|path| path.is_absolute() && is_private_to(path, user));
        let path = match runtime {
            Some(runtime) => runtime.join("farwire"),
            None => std::env::temp_dir().join(format!("farwire-{user}")),
        };
        let folder = Self::private(path, user)?;
        folder.tidy();
        Ok(folder)
    }

    fn private(path: PathBuf, user: u32) -> io::Result<Self> {
        match rustix::fs::mkdir(&path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(at(&path, &error)),
        }
        let file =
            rustix::fs::open(&path, FOLDER | OFlags::NOFOLLOW, Mode::empty()).map_err(|error| {
                match error {
                    Errno::LOOP | Errno::NOTDIR => {
                        unsafe_folder(&path, "it is not a folder, or a link to one")
                    }
                    error => at(&path, &error),
                }
            })?;
        let found = rustix::fs::fstat(&file).map_err(|error| at(&path, &error))?;
        if found.st_uid != user {
            return Err(unsafe_folder(&path, &format!("it belongs to user {}", found.st_uid)));
        }
        if found.st_mode & 0o077 != 0 {
            let mode = found.st_mode & 0o777;
            let why =
                format!("others may use it (mode {mode:03o}; run: chmod 700 {})", path.display());
            return Err(unsafe_folder(&path, &why));
        }
        Ok(Self { file, path })
    }

    /// A folder that the user has named, made if need be.
    pub(super) fn named(path: &Path) -> io::Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let file = rustix::fs::open(path, FOLDER, Mode::empty())?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// Whether [`named`](Self::named) would work, as far as can be told without making the folder.
    pub(super) fn check_named(path: &Path) -> io::Result<()> {
        for place in path.ancestors() {
            let place = if place.as_os_str().is_empty() { Path::new(".") } else { place };
            match std::fs::metadata(place) {
                Ok(found) if found.is_dir() => {
                    let access = Access::WRITE_OK | Access::EXEC_OK;
                    return rustix::fs::accessat(CWD, place, access, AtFlags::EACCESS)
                        .map_err(|error| at(place, &error));
                }
                Ok(_) => return Err(at(place, &Errno::NOTDIR)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file, whole or not at all: a full disk must not leave half a record.
    pub(super) fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let draft = format!(".{name}.{}", std::process::id());
        let new =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(&self.file, &draft, new, Mode::RUSR | Mode::WUSR);
        let file = match open() {
            // Left by a process of the same number, long ago.
            Err(Errno::EXIST) => {
                rustix::fs::unlinkat(&self.file, &draft, AtFlags::empty())?;
                open()?
            }
            opened => opened?,
        };
        let written = std::fs::File::from(file)
            .write_all(content)
            .and_then(|()| Ok(rustix::fs::renameat(&self.file, &draft, &self.file, name)?));
        if written.is_err() {
            let _ = rustix::fs::unlinkat(&self.file, &draft, AtFlags::empty());
        }
        written
    }

    /// Removes old records. What cannot be removed stays.
    fn tidy(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut entries: Vec<_> = names(&self.file)
            .into_iter()
            .filter_map(|name| {
                let found =
                    rustix::fs::statat(&self.file, &name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
                Some((u64::try_from(found.st_mtime).unwrap_or(0), name))
            })
            .collect();
        entries.sort_by(|a, b| b.cmp(a));
        for (index, (changed, name)) in entries.into_iter().enumerate() {
            if index >= KEPT || changed.saturating_add(MAX_AGE) < now {
                self.remove(&name);
            }
        }
    }

    fn remove(&self, name: &CStr) {
        if rustix::fs::unlinkat(&self.file, name, AtFlags::empty()) != Err(Errno::ISDIR) {
            return;
        }
        let Ok(job) =
            rustix::fs::openat(&self.file, name, FOLDER | OFlags::NOFOLLOW, Mode::empty())
        else {
            return;
        };
        for record in names(&job) {
            let _ = rustix::fs::unlinkat(&job, &record, AtFlags::empty());
        }
        let _ = rustix::fs::unlinkat(&self.file, name, AtFlags::REMOVEDIR);
    }
}

/// The names of records, drafts and jobs' folders.
fn names(folder: impl AsFd) -> Vec<CString> {
    let Ok(entries) = Dir::read_from(folder) else { return Vec::new() };
    let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_owned()));
    let ours =
        |name: &[u8]| [&b"rank"[..], b".rank", b"job-"].iter().any(|start| name.starts_with(start));
    names.filter(|name| ours(name.to_bytes())).collect()
}

/// Whether a path is a folder that this user alone can write to.
fn is_private_to(path: &Path, user: u32) -> bool {
    let found = rustix::fs::statat(CWD, path, AtFlags::empty());
    found.is_ok_and(|found| {
        rustix::fs::FileType::from_raw_mode(found.st_mode).is_dir()
            && found.st_uid == user
            && found.st_mode & 0o022 == 0
    })
}

fn at(path: &Path, error: &Errno) -> io::Error {
    io::Error::new(io::Error::from(*error).kind(), format!("{}: {error}", path.display()))
}

fn unsafe_folder(path: &Path, why: &str) -> io::Error {
    let text =
        format!("{} is not safe: {why}; or name another in FARWIRE_FLIGHT_DIR", path.display());
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("farwire-folder-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn user(&self) -> u32 {
            fs::metadata(&self.0).unwrap().uid()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_folder_that_others_prepared_is_refused() {
        let scratch = Scratch::new("planted");
        let (user, path) = (scratch.user(), |name: &str| scratch.0.join(name));
        let refused = |name: &str, user| {
            let error = Folder::private(path(name), user).unwrap_err().to_string();
            assert!(error.contains("FARWIRE_FLIGHT_DIR"), "{error}");
            error
        };
        fs::create_dir(path("elsewhere")).unwrap();
        symlink(path("elsewhere"), path("link")).unwrap();
        symlink(path("nowhere"), path("dangling")).unwrap();
        fs::write(path("file"), "").unwrap();
        for name in ["link", "dangling", "file"] {
            assert!(refused(name, user).contains("not a folder"));
        }
        assert!(!path("nowhere").exists());
        for mode in [0o777, 0o1777, 0o770, 0o750, 0o701] {
            fs::create_dir(path("open")).unwrap();
            fs::set_permissions(path("open"), fs::Permissions::from_mode(mode)).unwrap();
            assert!(refused("open", user).contains("chmod 700"));
            fs::remove_dir(path("open")).unwrap();
        }
        assert!(refused("elsewhere2", user.wrapping_add(1)).contains("belongs to user"));
        let made = Folder::private(path("mine"), user).unwrap();
        assert_eq!(fs::metadata(made.path()).unwrap().mode() & 0o777, 0o700);
        assert!(Folder::private(path("mine"), user).is_ok(), "a second time");
    }

    #[test]
    fn a_record_replaces_a_link_and_never_follows_it() {
        let scratch = Scratch::new("links");
        let folder = Folder::named(&scratch.0.join("a/b")).unwrap();
        let victim = scratch.0.join("victim");
        fs::write(&victim, "precious").unwrap();
        for name in ["rank0-1.json".to_owned(), format!(".rank0-1.json.{}", std::process::id())] {
            symlink(&victim, folder.path().join(name)).unwrap();
        }
        folder.write("rank0-1.json", b"record").unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        let record = folder.path().join("rank0-1.json");
        assert!(fs::symlink_metadata(&record).unwrap().is_file());
        assert_eq!(fs::read_to_string(&record).unwrap(), "record");
        assert_eq!(fs::metadata(&record).unwrap().mode() & 0o777, 0o600);
        folder.write("rank0-1.json", b"again").unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no draft is left");
    }

    #[test]
    fn old_records_go_and_the_newest_and_other_files_stay() {
        let scratch = Scratch::new("tidy");
        let folder = Folder::private(scratch.0.join("mine"), scratch.user()).unwrap();
        let path = |name: &str| folder.path().join(name);
        let age = |name: &str, seconds: u64| {
            let then = SystemTime::now() - std::time::Duration::from_secs(seconds);
            fs::File::open(path(name)).unwrap().set_modified(then).unwrap();
        };
        fs::create_dir(path("job-1-1")).unwrap();
        fs::write(path("job-1-1/rank0-1.json"), "").unwrap();
        age("job-1-1", MAX_AGE + 60);
        folder.write("rank0-1.json", b"").unwrap();
        age("rank0-1.json", MAX_AGE + 60);
        fs::write(path("notes"), "").unwrap();
        age("notes", MAX_AGE + 60);
        for index in 0..KEPT + 5 {
            let name = format!("rank1-{index}.json");
            folder.write(&name, b"").unwrap();
            age(&name, index as u64 * 10);
        }
        folder.tidy();
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut left: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        left.sort();
        let mut expected: Vec<_> = (0..KEPT).map(|index| format!("rank1-{index}.json")).collect();
        expected.push("notes".to_owned());
        expected.sort();
        assert_eq!(left, expected);
    }
}
