//! Packets as a TAP device with `IFF_VNET_HDR` gives and takes them: a `virtio_net_hdr`, then an Ethernet frame, which
//! may be a super-packet. Pure.

use std::ops::Range;

/// The `virtio_net_hdr` that precedes each frame: flags, kind of super-packet, length of headers, payload of a segment,
/// where a checksum begins and where in it it stands; the last four are 16 bits in the machine's order.
pub(super) const PREFIX: usize = 10;

const FLAGS: usize = 0;
const KIND: usize = 1;
const HEADERS: usize = 2;
const SEGMENT: usize = 4;
const CHECK_START: usize = 6;

const NEEDS_CHECKSUM: u8 = 1;
const NONE: u8 = 0;
const TCP4: u8 = 1;
const TCP6: u8 = 4;
/// Explicit congestion notification, beside the kind.
const ECN: u8 = 0x80;

const ETHERNET: usize = 14;

/// What a frame takes on the wire beside itself: check sequence, preamble and gap.
const AROUND: u64 = 24;

const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// What a packet consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Bytes from the frame's start to the payload: each segment has these.
    headers: usize,
    /// Where TCP's header begins, from the frame's start; 0 if the packet is one segment, which is never cut.
    tcp: usize,
    payload: usize,
    /// Payload of a segment; the last may have less.
    segment: usize,
}

impl Shape {
    /// Reads a packet. What is not understood is one segment.
    pub(super) fn of(packet: &[u8]) -> Self {
        let frame = packet.len().saturating_sub(PREFIX);
        let whole = Self {
            headers: frame,
            tcp: 0,
            payload: 0,
            segment: 0,
        };
        let Some(prefix) = packet.get(..PREFIX) else {
            return whole;
        };
        let kind = prefix[KIND] & !ECN;
        let (segment, tcp) = (word(prefix, SEGMENT), word(prefix, CHECK_START));
        if !matches!(kind, TCP4 | TCP6) || prefix[FLAGS] & NEEDS_CHECKSUM == 0 || segment == 0 {
            return whole;
        }
        // The length that the prefix gives is a hint only; TCP's own counts.
        let words = packet
            .get(PREFIX + tcp + 12)
            .map_or(0, |byte| usize::from(byte >> 4));
        let headers = tcp + words * 4;
        let least = ETHERNET + if kind == TCP4 { 20 } else { 40 };
        if tcp < least || words < 5 || headers >= frame {
            return whole;
        }
        Self {
            headers,
            tcp,
            payload: frame - headers,
            segment,
        }
    }

    /// Segments inside, one at least.
    pub(super) fn segments(&self) -> usize {
        if self.segment == 0 {
            return 1;
        }
        self.payload.div_ceil(self.segment)
    }

    fn payload_of(&self, segments: &Range<usize>) -> Range<usize> {
        let at = |segment: usize| (segment * self.segment).min(self.payload);
        at(segments.start)..at(segments.end)
    }

    /// What a segment takes on the wire: its IP packet and 38 bytes.
    pub(super) fn wire(&self, segment: usize) -> u64 {
        let payload = self.payload_of(&(segment..segment + 1));
        (self.headers + payload.len()) as u64 + AROUND
    }

    /// The packet that holds these segments alone, as if the sender had sent them so.
    pub(super) fn cut(&self, packet: &[u8], segments: &Range<usize>) -> Vec<u8> {
        if *segments == (0..self.segments()) {
            return packet.to_vec();
        }
        let payload = self.payload_of(segments);
        let start = PREFIX + self.headers;
        let mut piece = Vec::with_capacity(start + payload.len());
        piece.extend_from_slice(&packet[..start]);
        piece.extend_from_slice(&packet[start + payload.start..start + payload.end]);
        if segments.len() == 1 {
            piece[KIND] = NONE;
            set(&mut piece, SEGMENT, 0);
        }
        set(&mut piece, HEADERS, self.headers);

        let is_last = segments.end == self.segments();
        let frame = &mut piece[PREFIX..];
        let four = frame[ETHERNET] >> 4 == 4;
        let behind_ethernet = frame.len() - ETHERNET;
        let (ip, tcp) = frame[ETHERNET..].split_at_mut(self.tcp - ETHERNET);

        let number = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
        let number = number.wrapping_add(payload.start as u32);
        tcp[4..8].copy_from_slice(&number.to_be_bytes());
        if !is_last {
            tcp[13] &= !(FIN | PSH);
        }
        if segments.start > 0 {
            tcp[13] &= !CWR;
        }

        let addresses = if four {
            big(ip, 2, behind_ethernet);
            let id = u16::from_be_bytes([ip[4], ip[5]]).wrapping_add(segments.start as u16);
            big(ip, 4, usize::from(id));
            big(ip, 10, 0);
            let check = !fold(sum(ip));
            big(ip, 10, usize::from(check));
            12..20
        } else {
            big(ip, 4, behind_ethernet - 40);
            8..40
        };
        // What the next hop's checksum starts from: TCP's pseudo-header, not inverted.
        let pseudo = sum(&ip[addresses]) + 6 + tcp.len() as u64;
        big(tcp, 16, usize::from(fold(pseudo)));
        piece
    }
}

fn word(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_ne_bytes([bytes[at], bytes[at + 1]]))
}

fn set(bytes: &mut [u8], at: usize, value: usize) {
    bytes[at..at + 2].copy_from_slice(&(value as u16).to_ne_bytes());
}

fn big(bytes: &mut [u8], at: usize, value: usize) {
    bytes[at..at + 2].copy_from_slice(&(value as u16).to_be_bytes());
}

/// The sum of 16-bit words, as RFC 1071 has it, not folded.
fn sum(bytes: &[u8]) -> u64 {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let whole: u64 = pairs
        .iter()
        .map(|pair| u64::from(u16::from_be_bytes(*pair)))
        .sum();
    whole + rest.first().map_or(0, |byte| u64::from(*byte) << 8)
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A super-packet of IPv4: `payload` bytes in segments of 1000, from sequence number 0xffff_fff0 and id 0xffff.
    fn four(payload: usize) -> Vec<u8> {
        let mut packet = vec![0; PREFIX + 54 + payload];
        packet[FLAGS] = NEEDS_CHECKSUM;
        packet[KIND] = TCP4;
        set(&mut packet, SEGMENT, 1000);
        set(&mut packet, CHECK_START, 34);
        set(&mut packet, 8, 16);
        let frame = &mut packet[PREFIX..];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        big(frame, 16, 40 + payload);
        frame[18..20].copy_from_slice(&[0xff, 0xff]);
        frame[23] = 6;
        frame[26..34].copy_from_slice(&[10, 78, 0, 1, 10, 78, 0, 2]);
        frame[38..42].copy_from_slice(&[0xff, 0xff, 0xff, 0xf0]);
        frame[46] = 5 << 4;
        frame[47] = CWR | PSH | FIN | 0x10;
        for (at, byte) in frame[54..].iter_mut().enumerate() {
            *byte = (at / 1000) as u8 + 1;
        }
        packet
    }

    fn six(payload: usize) -> Vec<u8> {
        let old = four(payload);
        let mut packet = old[..PREFIX + 14].to_vec();
        packet[KIND] = TCP6;
        set(&mut packet, CHECK_START, 54);
        packet.extend([0x60, 0, 0, 0]);
        packet.extend(((20 + payload) as u16).to_be_bytes());
        packet.extend([6, 64]);
        packet.extend([0xfd; 32]);
        packet.extend(&old[PREFIX + 34..]);
        packet
    }

    #[test]
    fn a_super_packet_is_counted_segment_by_segment() {
        let shape = Shape::of(&four(2500));
        assert_eq!(shape.segments(), 3);
        let wires: Vec<u64> = (0..3).map(|at| shape.wire(at)).collect();
        // IP's length and 38.
        assert_eq!(wires, [1078, 1078, 578]);
        assert_eq!(Shape::of(&four(2000)).segments(), 2);
        assert_eq!(Shape::of(&six(2500)).segments(), 3);
        assert_eq!(Shape::of(&six(2500)).wire(0), 1098);
    }

    #[test]
    fn what_is_no_super_packet_of_tcp_is_one_segment() {
        let mut plain = four(500);
        plain[KIND] = NONE;
        let shape = Shape::of(&plain);
        assert_eq!((shape.segments(), shape.wire(0)), (1, 578));
        assert_eq!(shape.cut(&plain, &(0..1)), plain);
        // Too short to be anything, a header that ends behind the packet, a segment of nothing.
        assert_eq!(Shape::of(&[0; 4]).segments(), 1);
        let mut long = four(10);
        long[PREFIX + 46] = 0xf0;
        assert_eq!(Shape::of(&long).segments(), 1);
        let mut none = four(10);
        set(&mut none, SEGMENT, 0);
        assert_eq!(Shape::of(&none).segments(), 1);
        let mut early = four(10);
        set(&mut early, CHECK_START, 20);
        assert_eq!(Shape::of(&early).segments(), 1);
    }

    #[test]
    fn a_cut_is_what_the_sender_would_have_sent() {
        let packet = four(2500);
        let shape = Shape::of(&packet);
        assert_eq!(
            shape.cut(&packet, &(0..3)),
            packet,
            "nothing lost, nothing touched"
        );

        let first = shape.cut(&packet, &(0..2));
        assert_eq!(first.len(), PREFIX + 54 + 2000);
        assert_eq!((first[KIND], word(&first, SEGMENT)), (TCP4, 1000));
        let frame = &first[PREFIX..];
        assert_eq!(frame[16..20], [0x07, 0xf8, 0xff, 0xff], "length and id");
        assert_eq!(frame[38..42], [0xff, 0xff, 0xff, 0xf0]);
        assert_eq!(frame[47], CWR | 0x10, "the end is not in it");
        assert_eq!(fold(sum(&frame[14..34])), 0xffff, "the header's checksum agrees");

        let last = shape.cut(&packet, &(2..3));
        assert_eq!(
            (last[KIND], word(&last, SEGMENT), last[FLAGS]),
            (NONE, 0, NEEDS_CHECKSUM)
        );
        let frame = &last[PREFIX..];
        assert_eq!(frame.len(), 554);
        assert_eq!(frame[16..20], [0x02, 0x1c, 0x00, 0x01]);
        assert_eq!(
            frame[38..42],
            [0x00, 0x00, 0x07, 0xc0],
            "the sequence number wraps"
        );
        assert_eq!(frame[47], PSH | FIN | 0x10);
        assert_eq!(fold(sum(&frame[14..34])), 0xffff);
        assert!(frame[54..].iter().all(|byte| *byte == 3));
        // 0x0a4e + 0x0001 + 0x0a4e + 0x0002 + 6 + 520
        assert_eq!(frame[50..52], (0x149f_u16 + 6 + 520).to_be_bytes());
    }

    #[test]
    fn version_six_is_cut_too() {
        let packet = six(2500);
        let shape = Shape::of(&packet);
        let middle = shape.cut(&packet, &(1..2));
        let frame = &middle[PREFIX..];
        assert_eq!(frame.len(), 74 + 1000);
        assert_eq!(frame[18..20], 1020_u16.to_be_bytes());
        assert_eq!(frame[67], 0x10);
        let pseudo = 16 * 0xfdfd_u64 + 6 + 1020;
        assert_eq!(frame[70..72], fold(pseudo).to_be_bytes());
    }

    #[test]
    fn sums_are_those_of_rfc_1071() {
        assert_eq!(
            fold(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7])),
            0xddf2
        );
        assert_eq!(fold(sum(&[1])), 0x0100);
    }
}
