use std::fs;

/// One machine, whose processes can share memory: host name and boot id, since containers may share a host name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) hostname: String,
    boot_id: String,
}

impl Node {
    const HOSTNAME_BYTES: usize = 256;
    const BOOT_ID_BYTES: usize = 40;

    pub(crate) fn current() -> Self {
        let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { hostname, boot_id: boot_id.trim().to_owned() }
    }

    /// An encoding that has the same length on every node.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.hostname.as_bytes().to_vec();
        bytes.resize(Self::HOSTNAME_BYTES, 0);
        bytes.extend_from_slice(self.boot_id.as_bytes());
        bytes.resize(Self::HOSTNAME_BYTES + Self::BOOT_ID_BYTES, 0);
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let (hostname, boot_id) = bytes.split_at(Self::HOSTNAME_BYTES);
        let text = |bytes| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
        Self { hostname: text(hostname), boot_id: text(boot_id) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_decoded_as_it_was_encoded() {
        let node = Node::current();
        assert!(!node.hostname.is_empty() && !node.boot_id.is_empty());
        assert_eq!(Node::from_bytes(&node.to_bytes()), node);
    }
}
