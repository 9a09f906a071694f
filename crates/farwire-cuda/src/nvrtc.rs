//! NVRTC, the compiler that is loaded at run time. One of the three files with `unsafe`.
//!
//! Rules:
//! 1. No NVRTC function is called before [`is_present`] has found the library: cudarc would panic.
//! 2. A program is destroyed exactly once, by [`Program`]'s drop, and not used afterwards.
//! 3. Buffers have the sizes that NVRTC returned just before.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use cudarc::nvrtc::sys;

use crate::error::DeviceError;

/// Whether the library is present. Looked up once; a program that is linked to it always has it.
fn is_present() -> bool {
    #[cfg(feature = "linked")]
    return true;
    #[cfg(not(feature = "linked"))]
    {
        static PRESENT: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        // SAFETY: loads a library, as the first use would; NVRTC does nothing when it is loaded.
        *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
    }
}

/// The compiler's version, or `None` if it is not on this machine.
pub fn nvrtc_version() -> Option<(i32, i32)> {
    if !is_present() {
        return None;
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: rule 1; both pointers are to integers.
    let result = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    (result == sys::nvrtcResult::NVRTC_SUCCESS).then_some((major, minor))
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: rule 2.
        unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// Compiles to machine code for one architecture.
pub(crate) fn compile(
    name: &str,
    source: &str,
    options: &[String],
) -> Result<Vec<u8>, DeviceError> {
    if !is_present() {
        return Err(DeviceError::NoNvrtc);
    }
    let failed = |log: String| DeviceError::Compile { kernel: name.into(), log };
    let text = |text: &str| CString::new(text).map_err(|_| failed("a zero in the text".into()));
    let (source, title) = (text(source)?, text(name)?);
    let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = ptr::null_mut();
    // SAFETY: rule 1; the texts live until this function returns; there are no headers.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &mut program,
            source.as_ptr(),
            title.as_ptr(),
            0,
            ptr::null(),
            ptr::null(),
        )
    };
    if created != sys::nvrtcResult::NVRTC_SUCCESS {
        return Err(failed(format!("{created:?}")));
    }
    let program = Program(program);
    // SAFETY: as many options as the length says, all alive.
    let compiled =
        unsafe { sys::nvrtcCompileProgram(program.0, options.len() as i32, options.as_ptr()) };
    if compiled != sys::nvrtcResult::NVRTC_SUCCESS {
        return Err(failed(format!("{compiled:?}\n{}", log(&program))));
    }
    let mut size = 0;
    // SAFETY: the program has been compiled; rule 3.
    let got = unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) };
    let mut code = vec![0u8; size];
    if got == sys::nvrtcResult::NVRTC_SUCCESS && size > 0 {
        // SAFETY: rule 3.
        let got = unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()) };
        if got == sys::nvrtcResult::NVRTC_SUCCESS {
            return Ok(code);
        }
    }
    Err(failed("the compiler left no machine code".into()))
}

fn log(program: &Program) -> String {
    let mut size = 0;
    // SAFETY: the program is alive; rule 3.
    let got = unsafe { sys::nvrtcGetProgramLogSize(program.0, &mut size) };
    let mut log = vec![0u8; size + 1];
    if got == sys::nvrtcResult::NVRTC_SUCCESS {
        // SAFETY: rule 3, and the buffer has one more zero.
        unsafe { sys::nvrtcGetProgramLog(program.0, log.as_mut_ptr().cast()) };
    }
    let text = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy);
    text.map(Into::into).unwrap_or_default()
}
