//! The kernels' source, built into the program.

/// A file of kernels and the macros defined for it: one compilation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    file: File,
    defines: Vec<(&'static str, usize)>,
}

/// The files that are compiled after `common.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum File {
    Bench,
    Block,
    Cast,
    Finish,
    Kept,
    Power,
    RandK,
    Sign,
    TopK,
    Training,
}

const COMMON: &str = include_str!("kernels/common.cu");

impl File {
    fn name_and_text(self) -> (&'static str, &'static str) {
        match self {
            Self::Bench => ("bench.cu", include_str!("kernels/bench.cu")),
            Self::Block => ("block.cu", include_str!("kernels/block.cu")),
            Self::Cast => ("cast.cu", include_str!("kernels/cast.cu")),
            Self::Finish => ("finish.cu", include_str!("kernels/finish.cu")),
            Self::Kept => ("kept.cu", include_str!("kernels/kept.cu")),
            Self::Power => ("power.cu", include_str!("kernels/power.cu")),
            Self::RandK => ("randk.cu", include_str!("kernels/randk.cu")),
            Self::Sign => ("sign.cu", include_str!("kernels/sign.cu")),
            Self::TopK => ("topk.cu", include_str!("kernels/topk.cu")),
            Self::Training => ("training.cu", include_str!("kernels/training.cu")),
        }
    }
}

impl Source {
    pub(crate) fn new(file: File, defines: &[(&'static str, usize)]) -> Self {
        Self { file, defines: defines.to_vec() }
    }

    /// The file's name, for errors.
    pub(crate) fn name(&self) -> &'static str {
        self.file.name_and_text().0
    }

    /// The whole text to compile. Line numbers in the compiler's messages are those of the files.
    pub(crate) fn text(&self) -> String {
        let (name, text) = self.file.name_and_text();
        let defines: String =
            self.defines.iter().map(|(name, value)| format!("#define {name} {value}\n")).collect();
        format!("{defines}#line 1 \"common.cu\"\n{COMMON}\n#line 1 \"{name}\"\n{text}")
    }
}

/// The compiler's options. Those that make float arithmetic match the CPU's must not be changed.
pub(crate) fn options((major, minor): (i32, i32)) -> Vec<String> {
    vec![
        format!("--gpu-architecture=sm_{major}{minor}"),
        "--fmad=false".into(),
        "--ftz=false".into(),
        "--prec-div=true".into(),
        "--prec-sqrt=true".into(),
        "--std=c++17".into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_differ_by_what_is_set() {
        let int8 = Source::new(File::Block, &[("VALUE", 0), ("FORMAT", 0)]);
        let fp8 = Source::new(File::Block, &[("VALUE", 0), ("FORMAT", 2)]);
        assert!(
            int8.text().starts_with("#define VALUE 0\n#define FORMAT 0\n#line 1 \"common.cu\"")
        );
        assert_ne!(int8.text(), fp8.text());
        assert!(int8.text().contains("block_encode"));
    }

    #[test]
    fn no_multiply_and_add_is_contracted() {
        let options = options((9, 0));
        assert!(options.contains(&"--fmad=false".into()), "{options:?}");
        assert!(options.contains(&"--gpu-architecture=sm_90".into()), "{options:?}");
    }
}
