//! Which layer a user means.

/// Why a text names no layer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayerNameError {
    /// No such layer.
    #[error(
        "there is no layer `{name}`; the profile has {layers} layers, from `{first}` to `{last}`"
    )]
    Unknown {
        /// What was given.
        name: String,
        /// How many layers there are.
        layers: usize,
        /// Name of the first one.
        first: String,
        /// Name of the last one.
        last: String,
    },
    /// Several layers have it as a part of their names.
    #[error("`{name}` may be `{one}` or `{other}`: write the whole name")]
    Ambiguous {
        /// What was given.
        name: String,
        /// A layer that it may be.
        one: String,
        /// Another one.
        other: String,
    },
}

/// The layer that `text` means among `names`: the one of that name, the one of that number (from 0), or the only one
/// with `text` between the slashes of its name, as exporters build them: `conv1` for `/conv1/Conv`.
///
/// # Errors
/// If there is none, or several have it between their slashes.
pub fn find(names: &[&str], text: &str) -> Result<usize, LayerNameError> {
    if let Some(named) = names.iter().position(|&name| name == text) {
        return Ok(named);
    }
    if let Some(number) = text.parse().ok().filter(|&number| number < names.len()) {
        return Ok(number);
    }
    let wanted = format!("/{}/", text.trim_matches('/'));
    let mut parts = names
        .iter()
        .enumerate()
        .filter(|(_, name)| format!("/{}/", name.trim_matches('/')).contains(&wanted));
    match (parts.next(), parts.next()) {
        (Some((layer, _)), None) => Ok(layer),
        (Some((_, one)), Some((_, other))) => Err(LayerNameError::Ambiguous {
            name: text.to_owned(),
            one: (*one).to_owned(),
            other: (*other).to_owned(),
        }),
        _ => Err(LayerNameError::Unknown {
            name: text.to_owned(),
            layers: names.len(),
            first: names.first().copied().unwrap_or_default().to_owned(),
            last: names.last().copied().unwrap_or_default().to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_before_numbers_and_those_before_parts_of_names() {
        let names = [
            "/conv1/Conv",
            "/block.0/conv1/Conv",
            "1",
            "node4/Conv2d",
            "/fc1/Gemm",
        ];
        assert_eq!(find(&names, "/conv1/Conv"), Ok(0));
        assert_eq!(find(&names, "1"), Ok(2));
        assert_eq!(find(&names, "3"), Ok(3));
        assert_eq!(find(&names, "node4"), Ok(3));
        assert_eq!(find(&names, "fc1"), Ok(4));
        assert_eq!(find(&names, "block.0/conv1"), Ok(1));
        assert!(matches!(
            find(&names, "conv1"),
            Err(LayerNameError::Ambiguous { .. })
        ));
        for none in ["conv", "5", "", "/", "node"] {
            assert!(
                matches!(find(&names, none), Err(LayerNameError::Unknown { .. })),
                "{none}"
            );
        }
    }
}
