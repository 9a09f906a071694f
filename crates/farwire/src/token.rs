//! The cluster token: the only secret.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use aws_lc_rs::{hkdf, rand};

/// 256 random bits that all processes of a cluster share. Everything secret is derived from it; it
/// never crosses the wire.
///
/// As text it is `fw-` and 64 hexadecimal digits.
#[derive(Clone, PartialEq, Eq)]
pub struct Token([u8; 32]);

/// Why a text is not a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a cluster token: {0}; make one with `farwire token` and give it to all ranks in \
     FARWIRE_TOKEN or FARWIRE_TOKEN_FILE"
)]
pub struct TokenError(&'static str);

impl Token {
    /// A new token, from the operating system's randomness.
    ///
    /// # Panics
    ///
    /// If the operating system has none to give.
    pub fn generate() -> Self {
        let mut bytes = [0; 32];
        rand::fill(&mut bytes).expect("the operating system gives randomness");
        Self(bytes)
    }

    /// Key material for one purpose. Other purposes give unrelated keys.
    pub(crate) fn derive<const N: usize>(&self, purpose: &str) -> [u8; N] {
        struct Bytes(usize);
        impl hkdf::KeyType for Bytes {
            fn len(&self) -> usize {
                self.0
            }
        }
        let mut key = [0; N];
        let secret =
            hkdf::Salt::new(hkdf::HKDF_SHA256, b"farwire cluster token v1").extract(&self.0);
        let info = [purpose.as_bytes()];
        let output = secret.expand(&info, Bytes(N)).expect("a key is short enough to derive");
        output.fill(&mut key).expect("the lengths agree");
        key
    }

    /// Reads the token in a file, which only its owner may be able to read.
    pub(crate) fn read(path: &Path) -> io::Result<Self> {
        let at =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let mut file = fs::File::open(path).map_err(at)?;
        let about = file.metadata().map_err(at)?;
        if !about.is_file() {
            return Err(io::Error::other(format!(
                "{} is not a file with a token in it",
                path.display()
            )));
        }
        let mode = about.permissions().mode();
        if mode & 0o077 != 0 {
            return Err(io::Error::other(format!(
                "{0} can be read by others (mode {1:03o}); run: chmod 600 {0}",
                path.display(),
                mode & 0o777
            )));
        }
        let mut text = String::new();
        Read::by_ref(&mut file).take(1024).read_to_string(&mut text).map_err(at)?;
        text.trim().parse().map_err(|error| at(io::Error::other::<TokenError>(error)))
    }

    /// This user's token for clusters on loopback, made on first use.
    pub(crate) fn of_user() -> io::Result<Self> {
        let path = user_file().ok_or_else(|| {
            io::Error::other("neither XDG_CONFIG_HOME nor HOME says where to keep the key file")
        })?;
        match Self::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => return result,
        }
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)?;
        // Several ranks may be the first: each writes a file of its own, and one of them gets the
        // name.
        let own = folder.join(format!(".loopback-{}", std::process::id()));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&own)?;
        let written = file.write_all(format!("{}\n", Self::generate().reveal()).as_bytes());
        let linked = written.and_then(|()| fs::hard_link(&own, &path));
        fs::remove_file(&own)?;
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Self::read(&path),
        }
    }

    /// The token as text. Whoever reads it can join the cluster.
    pub fn reveal(&self) -> String {
        let digits: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("fw-{digits}")
    }
}

fn user_file() -> Option<PathBuf> {
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let config =
        config.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".config")))?;
    Some(config.join("farwire/loopback.token"))
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let digits = text.strip_prefix("fw-").ok_or(TokenError("it does not start with `fw-`"))?;
        if digits.len() != 64 || !digits.is_ascii() {
            return Err(TokenError("it does not have 64 digits behind `fw-`"));
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
            let pair =
                std::str::from_utf8(pair).map_err(|_| TokenError("it is not hexadecimal"))?;
            *byte =
                u8::from_str_radix(pair, 16).map_err(|_| TokenError("it is not hexadecimal"))?;
        }
        // 32 random bytes have fewer than 20 different values once in 10¹² tokens.
        let mut values = bytes.to_vec();
        values.sort_unstable();
        values.dedup();
        if values.len() < 20 {
            return Err(TokenError("it is not random"));
        }
        Ok(Self(bytes))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_round_trip_and_differ() {
        let token = Token::generate();
        assert_eq!(token.reveal().parse(), Ok(token.clone()));
        assert_ne!(token, Token::generate());
        assert_ne!(token.derive::<32>("one"), token.derive::<32>("two"));
        assert_eq!(token.derive::<32>("one"), token.clone().derive::<32>("one"));
        assert!(
            !format!("{token:?}").contains(&token.reveal()[3..]),
            "a token is not shown by accident"
        );
    }

    #[test]
    fn weak_tokens_are_refused() {
        for text in [
            "",
            "secret",
            "fw-",
            "fw-1234",
            &format!("fw-{}", "00".repeat(32)),
            &format!("fw-{}", "zz".repeat(32)),
            &format!("fw-{}", "0123456789abcdef".repeat(4)),
            &format!("fw-{}", "é".repeat(32)),
        ] {
            let error = text.parse::<Token>().unwrap_err().to_string();
            assert!(error.contains("farwire token"), "{error}");
        }
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let path = std::env::temp_dir().join(format!("farwire-token-test-{}", std::process::id()));
        fs::write(&path, Token::generate().reveal()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = Token::read(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(Token::read(&path).is_ok());
        fs::remove_file(&path).unwrap();
    }
}
